"""Parameters as tensors of a checkpoint: shapes, slices read and tensors written, against NumPy on whole tensors."""

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from kvjax.models import Rows, Weight, by_tensor, hf_shapes

M, H, G, D, F, V = 6, 3, 2, 4, 5, 7  # width, kv heads, query heads a kv head, channels, MLP columns, vocabulary
RNG = np.random.default_rng(0)


def drawn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


QUERY, KEY, VALUE, OUT = drawn(H * G * D, M), drawn(H * D, M), drawn(H * D, M), drawn(M, H * G * D)  # as [out, in]
GATE, UP, EMBED, SCALE, BIAS = drawn(F, M), drawn(F, M), drawn(V, M), drawn(M), drawn(H * D)
QKV = np.concatenate([QUERY, KEY, VALUE])
GATE_UP = np.concatenate([GATE, UP])
WQKV = np.concatenate(  # a block a kv head: its query heads, its key, its value
    [QUERY.reshape(H, G * D, M), KEY.reshape(H, D, M), VALUE.reshape(H, D, M)], axis=1
).reshape(-1, M)
BLOCK, ALL = (G + 2) * D, (H * G + 2 * H) * D

# The parameter, the checkpoint's tensor, and what the parameter must be: [in, out] with heads as axes of their own.
CASES = {
    "vector": (Weight("norm.scale", "norm.weight", False), SCALE, SCALE),
    "embedding": (Weight("embed", "embed.weight", False), EMBED, EMBED),
    "bias": (Weight("attention.key_bias", "k.bias", False), BIAS, BIAS.reshape(H, D)),
    "linear": (Weight("mlp.up", "up.weight", True), UP, UP.T),
    "heads": (Weight("attention.query", "q.weight", True), QUERY, QUERY.T.reshape(M, H * G, D)),
    "output": (Weight("attention.output", "o.weight", True), OUT, OUT.T.reshape(H * G, D, M)),
    "fused query": (
        Weight("attention.query", "qkv.weight", True, Rows(0, H * G * D, ALL)),
        QKV,
        QUERY.T.reshape(M, H * G, D),
    ),
    "fused value": (
        Weight("attention.value", "qkv.weight", True, Rows(ALL - H * D, ALL, ALL)),
        QKV,
        VALUE.T.reshape(M, H, D),
    ),
    "fused up": (Weight("mlp.up", "gate_up.weight", True, Rows(F, 2 * F, 2 * F)), GATE_UP, UP.T),
    "interleaved query": (
        Weight("attention.query", "wqkv.weight", True, Rows(0, G * D, BLOCK)),
        WQKV,
        QUERY.T.reshape(M, H * G, D),
    ),
    "interleaved key": (
        Weight("attention.key", "wqkv.weight", True, Rows(G * D, (G + 1) * D, BLOCK)),
        WQKV,
        KEY.T.reshape(M, H, D),
    ),
    "interleaved bias": (
        Weight("attention.key_bias", "wqkv.bias", False, Rows(G * D, (G + 1) * D, BLOCK)),
        WQKV[:, 0].copy(),
        KEY[:, 0].reshape(H, D),
    ),
}
cases = pytest.mark.parametrize(("weight", "tensor", "parameter"), CASES.values(), ids=CASES)


class Recorded:
    """A tensor that counts how often each of its numbers is read."""

    def __init__(self, tensor: np.ndarray):
        self.tensor, self.reads = tensor, np.zeros(tensor.shape, int)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        assert [type(part) for part in index] == [slice] * self.tensor.ndim
        self.reads[index] += 1
        return self.tensor[index]


def indices(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The whole, and every axis cut in its middle, alone and with the others."""
    whole = tuple(slice(0, size, None) for size in shape)
    alone = [(*whole[:axis], part, *whole[axis + 1 :]) for axis in range(len(shape)) for part in halves(shape[axis])]
    together = [tuple(halves(size)[half] for size in shape) for half in (0, 1)]
    return [(slice(None),) * len(shape), *alone, *together]


def halves(size: int) -> tuple[slice, slice]:
    return slice(0, size // 2), slice(size // 2, size)


@cases
def test_shape_in_the_checkpoint(weight, tensor, parameter):
    assert weight.hf_shape(parameter.shape) == tensor.shape


@pytest.mark.parametrize("at_a_time", [2**22, 2 * M])
@cases
def test_any_slice_is_read(weight, tensor, parameter, at_a_time, monkeypatch):
    monkeypatch.setattr("kvjax.models.weights.READ", at_a_time)
    for index in indices(parameter.shape):
        recorded = Recorded(tensor)
        read = weight.read(recorded, parameter.shape, index, np.float32)
        np.testing.assert_array_equal(read, parameter[index])
        assert read.flags.c_contiguous
        assert recorded.reads.max() == 1
        split_channels = parameter.ndim == 3 and "output" in weight.path and index[1] in halves(D)
        if not split_channels:  # the columns between one head's channels and the next one's are read along
            assert recorded.reads.sum() == parameter[index].size


def test_slices_of_a_file_are_cast(tmp_path):
    weight, tensor, parameter = CASES["interleaved key"]
    half = tensor.astype(np.float16)
    save_file({weight.name: half}, tmp_path / "file")
    with safe_open(tmp_path / "file", framework="numpy") as file:
        read = weight.read(file.get_slice(weight.name), parameter.shape, (slice(1, 5), slice(1, 3), slice(None)), "f4")
    np.testing.assert_array_equal(read, parameter.astype(np.float16).astype(np.float32)[1:5, 1:3])


def linear(path: str, name: str, tensor: np.ndarray, rows: Rows) -> tuple[Weight, np.ndarray]:
    heads = () if path.startswith("mlp") else (D,)
    return Weight(path, name, True, rows), tensor.T.reshape(M, -1, *heads)


FUSED = {
    "qkv": (
        QKV,
        linear("attention.query", "qkv.weight", QUERY, Rows(0, 24, ALL)),
        linear("attention.key", "qkv.weight", KEY, Rows(24, 36, ALL)),
        linear("attention.value", "qkv.weight", VALUE, Rows(36, 48, ALL)),
    ),
    "wqkv": (
        WQKV,
        linear("attention.query", "wqkv.weight", QUERY, Rows(0, 8, BLOCK)),
        linear("attention.key", "wqkv.weight", KEY, Rows(8, 12, BLOCK)),
        linear("attention.value", "wqkv.weight", VALUE, Rows(12, 16, BLOCK)),
    ),
    "gate_up": (
        GATE_UP,
        linear("mlp.gate", "gate_up.weight", GATE, Rows(0, F, 2 * F)),
        linear("mlp.up", "gate_up.weight", UP, Rows(F, 2 * F, 2 * F)),
    ),
}
ALONE = {name: (tensor, (weight, parameter)) for name, (weight, tensor, parameter) in CASES.items() if not weight.rows}


@pytest.mark.parametrize("case", (FUSED | ALONE).values(), ids=FUSED | ALONE)
def test_parameters_are_written_as_the_tensor_they_share(case):
    tensor, *parts = case
    table = [weight for weight, _ in parts]
    assert by_tensor(table[::-1]) == {table[0].name: tuple(table)}
    assert hf_shapes(table[::-1], {weight.path: part.shape for weight, part in parts}) == {table[0].name: tensor.shape}
    written = np.full(tensor.shape, np.nan, np.float32)
    for weight, parameter in parts:
        weight.write(parameter, written)
    np.testing.assert_array_equal(written, tensor)


@pytest.mark.parametrize(
    "rows",
    [
        (Rows(0, 4, 12), Rows(4, 8, 12)),  # a third is missing
        (Rows(0, 4, 8), Rows(0, 4, 8)),
        (Rows(0, 4, 8), Rows(4, 12, 12)),
        (Rows(0, 4, 8), None),
        (None, None),
    ],
)
def test_parts_that_make_up_no_tensor(rows):
    table = [Weight(path, "fused.weight", True, part) for path, part in zip(("key", "value"), rows, strict=True)]
    with pytest.raises(ValueError, match=r"key, value do not make up the tensor fused.weight|value, key do not"):
        hf_shapes(table, {"key": (M, 8), "value": (M, 8)})


def test_rows_that_do_not_divide_the_parameter():
    with pytest.raises(ValueError, match="key has 8 rows in fused"):
        Weight("key", "fused.weight", True, Rows(0, 3, 6)).hf_shape((M, 8))

"""Mapping parameters to checkpoint tensors: shapes, reads of slices and writes, against NumPy on complete tensors."""

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from kvjax.models import FusedRows, Weight, by_tensor, hf_shapes

E, H, G, D, F, V = 6, 3, 2, 4, 5, 7  # hidden size, kv heads, group, head size, MLP columns, vocabulary
RNG = np.random.default_rng(0)


def drawn(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


QUERY, KEY, VALUE, OUT = drawn(H * G * D, E), drawn(H * D, E), drawn(H * D, E), drawn(E, H * G * D)  # as [out, in]
GATE, UP, EMBED, SCALE, BIAS = drawn(F, E), drawn(F, E), drawn(V, E), drawn(E), drawn(H * D)
QKV = np.concatenate([QUERY, KEY, VALUE])
GATE_UP = np.concatenate([GATE, UP])
WQKV = np.concatenate(  # one block per kv head: its query heads, its key, its value
    [QUERY.reshape(H, G * D, E), KEY.reshape(H, D, E), VALUE.reshape(H, D, E)], axis=1
).reshape(-1, E)
BLOCK, ALL = (G + 2) * D, (H * G + 2 * H) * D

# The weight, the checkpoint's tensor, and the expected parameter: [in, out] with heads as axes of their own.
CASES = {
    "vector": (Weight("norm.scale", "norm.weight", "vector"), SCALE, SCALE),
    "embedding": (Weight("embed", "embed.weight", "embedding"), EMBED, EMBED),
    "bias": (Weight("attention.key_bias", "k.bias", "vector"), BIAS, BIAS.reshape(H, D)),
    "linear": (Weight("mlp.up", "up.weight", "linear"), UP, UP.T),
    "heads": (Weight("attention.query", "q.weight", "linear"), QUERY, QUERY.T.reshape(E, H * G, D)),
    "output": (Weight("attention.output", "o.weight", "linear_from_heads"), OUT, OUT.T.reshape(H * G, D, E)),
    "fused query": (
        Weight("attention.query", "qkv.weight", "linear", FusedRows(0, H * G * D, ALL)),
        QKV,
        QUERY.T.reshape(E, H * G, D),
    ),
    "fused value": (
        Weight("attention.value", "qkv.weight", "linear", FusedRows(ALL - H * D, ALL, ALL)),
        QKV,
        VALUE.T.reshape(E, H, D),
    ),
    "fused up": (Weight("mlp.up", "gate_up.weight", "linear", FusedRows(F, 2 * F, 2 * F)), GATE_UP, UP.T),
    "interleaved query": (
        Weight("attention.query", "wqkv.weight", "linear", FusedRows(0, G * D, BLOCK)),
        WQKV,
        QUERY.T.reshape(E, H * G, D),
    ),
    "interleaved key": (
        Weight("attention.key", "wqkv.weight", "linear", FusedRows(G * D, (G + 1) * D, BLOCK)),
        WQKV,
        KEY.T.reshape(E, H, D),
    ),
    "interleaved bias": (
        Weight("attention.key_bias", "wqkv.bias", "vector", FusedRows(G * D, (G + 1) * D, BLOCK)),
        WQKV[:, 0].copy(),
        KEY[:, 0].reshape(H, D),
    ),
}
cases = pytest.mark.parametrize(("weight", "tensor", "parameter"), CASES.values(), ids=CASES)


class Recorded:
    """A tensor that counts the reads of each element."""

    def __init__(self, tensor: np.ndarray):
        self.tensor, self.reads = tensor, np.zeros(tensor.shape, int)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        assert [type(part) for part in index] == [slice] * self.tensor.ndim
        self.reads[index] += 1
        return self.tensor[index]


def indices(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Returns the index of the complete array, and of halves of it: along each axis alone, and along all axes."""
    complete = tuple(slice(0, size, None) for size in shape)
    alone = [
        (*complete[:axis], part, *complete[axis + 1 :]) for axis in range(len(shape)) for part in halves(shape[axis])
    ]
    together = [tuple(halves(size)[half] for size in shape) for half in (0, 1)]
    return [(slice(None),) * len(shape), *alone, *together]


def halves(size: int) -> tuple[slice, slice]:
    return slice(0, size // 2), slice(size // 2, size)


@cases
def test_shape_in_the_checkpoint(weight, tensor, parameter):
    assert weight.hf_shape(parameter.shape) == tensor.shape


@pytest.mark.parametrize("elements_per_read", [2**22, 2 * E])
@cases
def test_any_slice_is_read(weight, tensor, parameter, elements_per_read, monkeypatch):
    monkeypatch.setattr("kvjax.models.weights.READ", elements_per_read)
    for index in indices(parameter.shape):
        recorded = Recorded(tensor)
        read = weight.read(recorded, parameter.shape, index, np.float32)
        np.testing.assert_array_equal(read, parameter[index])
        assert read.flags.c_contiguous
        assert recorded.reads.max() == 1
        split_channels = parameter.ndim == 3 and weight.layout == "linear_from_heads" and index[1] in halves(D)
        if not split_channels:  # a read includes the columns between the channels of two heads
            assert recorded.reads.sum() == parameter[index].size


def test_slices_of_a_file_are_cast(tmp_path):
    weight, tensor, parameter = CASES["interleaved key"]
    half = tensor.astype(np.float16)
    save_file({weight.name: half}, tmp_path / "file")
    with safe_open(tmp_path / "file", framework="numpy") as file:
        read = weight.read(file.get_slice(weight.name), parameter.shape, (slice(1, 5), slice(1, 3), slice(None)), "f4")
    np.testing.assert_array_equal(read, parameter.astype(np.float16).astype(np.float32)[1:5, 1:3])


def linear(path: str, name: str, tensor: np.ndarray, rows: FusedRows) -> tuple[Weight, np.ndarray]:
    heads = () if path.startswith("mlp") else (D,)
    return Weight(path, name, "linear", rows), tensor.T.reshape(E, -1, *heads)


FUSED = {
    "qkv": (
        QKV,
        linear("attention.query", "qkv.weight", QUERY, FusedRows(0, 24, ALL)),
        linear("attention.key", "qkv.weight", KEY, FusedRows(24, 36, ALL)),
        linear("attention.value", "qkv.weight", VALUE, FusedRows(36, 48, ALL)),
    ),
    "wqkv": (
        WQKV,
        linear("attention.query", "wqkv.weight", QUERY, FusedRows(0, 8, BLOCK)),
        linear("attention.key", "wqkv.weight", KEY, FusedRows(8, 12, BLOCK)),
        linear("attention.value", "wqkv.weight", VALUE, FusedRows(12, 16, BLOCK)),
    ),
    "gate_up": (
        GATE_UP,
        linear("mlp.gate", "gate_up.weight", GATE, FusedRows(0, F, 2 * F)),
        linear("mlp.up", "gate_up.weight", UP, FusedRows(F, 2 * F, 2 * F)),
    ),
}
ALONE = {name: (tensor, (weight, parameter)) for name, (weight, tensor, parameter) in CASES.items() if not weight.rows}


@pytest.mark.parametrize("case", (FUSED | ALONE).values(), ids=FUSED | ALONE)
def test_parameters_of_a_tensor_are_written_into_it(case):
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
        (FusedRows(0, 4, 12), FusedRows(4, 8, 12)),  # the last third is missing
        (FusedRows(0, 4, 8), FusedRows(0, 4, 8)),
        (FusedRows(0, 4, 8), FusedRows(4, 12, 12)),
        (FusedRows(0, 4, 8), None),
        (None, None),
    ],
)
def test_parts_that_make_up_no_tensor(rows):
    table = [Weight(path, "fused.weight", "linear", part) for path, part in zip(("key", "value"), rows, strict=True)]
    with pytest.raises(ValueError, match=r"(key, value|value, key) do not cover the rows of the tensor fused.weight"):
        hf_shapes(table, {"key": (E, 8), "value": (E, 8)})


def test_rows_that_do_not_divide_the_parameter():
    with pytest.raises(ValueError, match=r"key has 8 rows in fused\.weight; expected a multiple of 3"):
        Weight("key", "fused.weight", "linear", FusedRows(0, 3, 6)).hf_shape((E, 8))

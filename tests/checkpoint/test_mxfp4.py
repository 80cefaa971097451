"""MXFP4 experts against a decoder of the format's definition, number by number, and in a checkpoint of gpt-oss."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.checkpoint import load, read_headers, save_hf, source_of
from kvjax.checkpoint.mxfp4 import Mxfp4
from kvjax.models import UnsupportedModelError
from tests.checkpoint.folders import HF, WEIGHTS, assert_equal, decoder, problems

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
FIELDS = HF | SIZES | {"model_type": "gpt_oss", "sliding_window": 5}
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"


class Bytes:
    """Bytes as a checkpoint has them."""

    def __init__(self, content: np.ndarray):
        self.content = content

    def get_shape(self) -> list[int]:
        return list(self.content.shape)

    def get_dtype(self) -> str:
        return "U8"

    def __getitem__(self, index) -> np.ndarray:
        return self.content[index]


def e2m1(bits: int) -> float:
    """OCP MX 1.0, table 5: sign, two bits of exponent with bias 1, one bit of mantissa; no infinities, no NaN."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    magnitude = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -magnitude if sign else magnitude


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The matrices [X, in, out] of blocks [X, out, n, 16] and scales [X, out, n], in float64, one number at a time."""
    experts, outputs, n, _ = blocks.shape
    result = np.empty((experts, n * 32, outputs))
    for x, o, i in np.ndindex(experts, outputs, n * 32):
        scale = int(scales[x, o, i // 32])
        byte = int(blocks[x, o, i // 32, i % 32 // 2])
        number = e2m1(byte & 15 if i % 2 == 0 else byte >> 4)
        result[x, i, o] = math.nan if scale == 255 else number * 2.0 ** (scale - 127)
    return result


def stored(rng: np.random.Generator, experts: int, inputs: int, outputs: int, low: int, high: int):
    blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(low, high, blocks.shape[:-1], dtype=np.uint8)


def test_every_number_and_scale() -> None:
    """All bytes and all scales. The smallest scale gives subnormal numbers, the largest ones go beyond float32."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(256, axis=1)
    scales = np.arange(256, dtype=np.uint8)[None, :, None].repeat(16, axis=2)
    tensor, expected = Mxfp4(Bytes(blocks), Bytes(scales)), decoded(blocks, scales)
    assert tensor.get_shape() == [1, 512, 256]
    read = tensor[slice(None), slice(None), slice(None)]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(read, expected.astype(np.float32))
    assert read.dtype == np.float32
    assert np.isnan(read[..., 255]).all()
    assert np.signbit(read[0, expected[0, :, 0] == 0, 0]).any()  # -0 is a number of the format


def test_slices() -> None:
    blocks, scales = stored(np.random.default_rng(0), 3, 96, 10, 120, 134)
    tensor, expected = Mxfp4(Bytes(blocks), Bytes(scales)), decoded(blocks, scales)
    for start, stop in ((0, 96), (0, 1), (31, 33), (32, 64), (40, 41), (5, 90)):
        index = slice(1, 3), slice(start, stop), slice(2, 9)
        np.testing.assert_array_equal(tensor[index], expected[index])


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with experts in MXFP4, and the same one with the numbers that the definition gives."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    params = decoder(**FIELDS)
    rng = np.random.default_rng(1)
    save_hf(jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params), plain)
    tensors = load_file(plain / WEIGHTS)
    quantised: dict[str, np.ndarray] = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = stored(rng, *tensors[name].shape, 119, 128)
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = decoded(blocks, scales).astype(np.float32)
    save_file(tensors, plain / WEIGHTS)
    packed.mkdir()
    save_file(
        {name: x for name, x in tensors.items() if f"{name}_blocks" not in quantised} | quantised, packed / WEIGHTS
    )
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


@pytest.mark.long
@pytest.mark.parametrize("model", [None, 2, 4])
def test_a_quantised_checkpoint(folder: tuple[Path, Path], model: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and by the experts of each device, in small reads."""
    packed, plain = folder
    monkeypatch.setattr("kvjax.models.stacked.READ", 500)
    mesh = None if model is None else kvjax.make_mesh(model=model)
    assert_equal(load(packed, mesh=mesh)[0], load(plain, mesh=mesh)[0])
    assert read_headers(source_of(packed))[0] == read_headers(source_of(plain))[0]


def test_it_is_written_in_full(folder: tuple[Path, Path], tmp_path: Path) -> None:
    packed, plain = folder
    save_hf(load(packed)[0], tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    written, expected = load_file(tmp_path / "again" / WEIGHTS), load_file(plain / WEIGHTS)
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(written[name], tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda x: x | {f"{GATE_UP}_scales": x[f"{GATE_UP}_scales"][:, :-1]},
            f"unexpected tensor(s): {GATE_UP}_blocks",
        ),
        (lambda x: {k: v for k, v in x.items() if k != f"{DOWN}_scales"}, f"missing tensor(s): {DOWN}"),
        (lambda x: x | {f"{DOWN}_blocks": x[f"{DOWN}_blocks"][..., :8].copy()}, f"missing tensor(s): {DOWN}"),
        (lambda x: x | {DOWN: np.zeros((4, 32, 64), np.float32)}, f"unexpected tensor(s): {DOWN}_blocks"),
        (
            lambda x: x | {f"{DOWN}_{k}": x[f"{DOWN}_{k}"][:, :-1].copy() for k in ("blocks", "scales")},
            f"{DOWN} has shape (4, 32, 63); config.json asks for (4, 32, 64)",
        ),
    ],
)
def test_faults_are_named(folder: tuple[Path, Path], change, message: str) -> None:
    tensors = load_file(folder[0] / WEIGHTS)
    save_file({name: np.ascontiguousarray(x) for name, x in change(tensors).items()}, folder[0] / WEIGHTS)
    assert any(message in problem for problem in problems(load, folder[0]))


@pytest.mark.parametrize("method", ["fp8", "mxfp8", None])
def test_other_quantisations_are_refused(folder: tuple[Path, Path], method: str | None) -> None:
    config = json.loads((folder[0] / "config.json").read_text())
    config["quantization_config"]["quant_method"] = method
    (folder[0] / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"quantization_config=.*accepted: none, or one with"):
        load(folder[0])


@pytest.mark.parity
def test_transformers_reads_the_same_numbers() -> None:
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = stored(np.random.default_rng(2), 2, 64, 6, 100, 140)
    expected = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    read = Mxfp4(Bytes(blocks), Bytes(scales))[slice(None), slice(None), slice(None)]
    np.testing.assert_array_equal(read, expected.float().numpy())

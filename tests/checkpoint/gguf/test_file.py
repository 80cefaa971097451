"""Loading GGUF files: all families and quantisations, slices and meshes, commands, and files that are refused."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.checkpoint import CheckpointError, load, read_headers, source_of
from kvjax.checkpoint.gguf.tensors import dequantised
from kvjax.checkpoint.parameters import Blank
from kvjax.checkpoint.tensors import compare
from kvjax.checks import installs
from kvjax.models import DecoderConfig, UnsupportedModelError
from tests.checkpoint.folders import assert_equal, problems
from tests.checkpoint.gguf.files import CASES, WIDE, permute, write
from tests.cli.commands import kv

LLAMA = CASES["llama"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(LLAMA, tmp_path / "model.gguf")
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("name", CASES)
def test_each_family_has_the_weights_of_its_folder(tmp_path, name):
    write(CASES[name], tmp_path / "model.gguf", "Q8_0", tmp_path / "hf")
    loaded, tokenizer = load(tmp_path / "model.gguf")
    assert_equal(loaded, load(tmp_path / "hf")[0])
    assert tokenizer is None


@pytest.mark.parametrize("kind", [kind.name for kind in dequantised().values()])
def test_each_type_has_the_values_of_the_library(tmp_path, kind):
    with np.errstate(all="ignore"):
        write(LLAMA, tmp_path / "model.gguf", kind, tmp_path / "hf", **WIDE)
    assert_equal(load(tmp_path / "model.gguf")[0], load(tmp_path / "hf")[0])


def test_the_types_that_the_issue_names_are_served():
    names = {kind.name for kind in dequantised().values()}
    assert names >= {
        "F32",
        "F16",
        "BF16",
        "Q8_0",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
    }


def test_slices_of_a_reordered_tensor(tmp_path):
    write(LLAMA, tmp_path / "model.gguf", "Q4_K", tmp_path / "hf", **WIDE)
    with ExitStack() as stack:
        tensors, unreadable = source_of(tmp_path / "model.gguf").open(stack, [])
        key = tensors["blk.0.attn_k.weight"]
        whole = key[slice(0, 128), slice(0, 256)]
        assert unreadable == set()
        for rows, columns in (
            (slice(3, 70), slice(0, 256)),
            (slice(127, 128), slice(5, 9)),
            (slice(0, 2), slice(250, 256)),
        ):
            np.testing.assert_array_equal(key[rows, columns], whole[rows, columns])
    assert not np.array_equal(permute(whole, 2), whole)


def test_only_the_rows_of_a_slice_are_dequantised(file, monkeypatch):
    counts = []
    real = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: counts.append(data.shape) or real(data, kind))
    with ExitStack() as stack:
        tensors, _ = source_of(file).open(stack, [])
        counts.clear()
        tensors["blk.0.ffn_down.weight"][slice(4, 9), slice(32, 40)]
    assert counts == [(5, 8 * 4)]


@pytest.mark.parametrize("name", ["llama", "phi3", "internlm2"])
def test_a_mesh_loads_the_same_weights(tmp_path, name):
    write(CASES[name], tmp_path / "model.gguf", "Q4_0")
    alone, _ = load(tmp_path / "model.gguf")
    spread, _ = load(tmp_path / "model.gguf", mesh=kvjax.make_mesh(model=2))
    assert len(spread.layers[0].attention.query[...].devices()) == 2
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(spread), strict=True):
        np.testing.assert_array_equal(one, other)


def test_dtypes(tmp_path):
    for kind, dtype in (("BF16", jnp.bfloat16), ("F16", jnp.float16), ("Q4_0", jnp.bfloat16)):
        write(LLAMA, tmp_path / "model.gguf", kind, tmp_path / kind)
        cast, _ = load(tmp_path / "model.gguf", dtype)
        assert_equal(cast, load(tmp_path / kind, dtype)[0])
        assert load(tmp_path / "model.gguf")[0].embed.dtype == jnp.float32  # norms are stored in float32


def test_commands_take_the_file(file, tmp_path):
    status, stdout, _ = kv("info", file, "--policy", "full", "--json")
    assert status == 0
    count = sum(leaf.size for leaf in jax.tree.leaves(load(file)[0]))
    assert json.loads(stdout)["parameters"] == count == read_headers(source_of(file))[0]
    status, stdout, _ = kv("convert", file, tmp_path / "out", "--json")
    assert (status, json.loads(stdout)["from"], json.loads(stdout)["to"]) == (0, "gguf", "hf")
    assert_equal(load(tmp_path / "out")[0], load(file)[0])
    status, _, stderr = kv("generate", file, "a")
    assert (status, "has no tokenizer" in stderr) == (2, True)


def test_restore_names_the_function_that_reads_the_file(file):
    assert problems(kvjax.restore, file) == ("it holds weights in GGUF, which kvjax.load reads",)


def test_a_file_of_another_name_is_known_by_its_first_bytes(file):
    assert_equal(load(file.rename(file.with_name("sha256-0123")))[0], load(file.with_suffix(".hf"))[0])


def test_the_library_is_not_installed(file, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("kvjax.checkpoint.gguf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert problems(load, file) == (f"reading GGUF needs the package gguf: expected {installs('gguf')}",)


def rewrite(file: Path, **changes: gguf.GGMLQuantizationType | np.ndarray | None) -> None:
    """Writes the file again with other tensors: removed ones, arrays, or the type of a tensor's bytes."""
    reader = gguf.GGUFReader(file)
    out = gguf.GGUFWriter(file.with_name("new.gguf"), "llama")
    for key, found in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            out.add_key_value(key, found.contents(), found.types[0])
    changes = {name.replace("__", "."): change for name, change in changes.items()}
    for tensor in reader.tensors:
        change = changes.pop(tensor.name, tensor.data)
        if change is not None:
            out.add_tensor(tensor.name, np.array(change), raw_dtype=None)
    for name, change in changes.items():
        out.add_tensor(name, change)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    file.with_name("new.gguf").replace(file)


def test_tensors_that_do_not_fit_are_listed(file):
    rewrite(
        file,
        blk__1__attn_q__weight=None,
        output_norm__weight=np.zeros(31, np.float32),
        blk__2__attn_q__weight=np.zeros((32, 32), np.float32),
        token_embd__weight=np.zeros((40, 32), np.int8),
    )
    assert problems(load, file) == (
        "token_embd.weight has the type I8; accepted: " + ", ".join(kind.name for kind in dequantised().values()),
        "missing tensor(s): blk.1.attn_q.weight",
        "output_norm.weight has shape (31,); its metadata asks for (32,)",
        "unexpected tensor(s): blk.2.attn_q.weight",
    )


def test_a_part_of_a_split_model_is_refused(tmp_path):
    write(LLAMA.with_keys(), tmp_path / "model.gguf")
    out = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    out.add_uint16("split.count", 3)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    assert problems(load, tmp_path / "part.gguf")[0].startswith("it is one of 3 files of a model; expected one file")


def test_every_damage_is_one_clear_error(file):
    """Damages of the header, which are never believed where they can be seen, and never hang or crash."""
    whole = file.read_bytes()
    end = source_of(file)._header.data
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        content = bytearray(whole)
        start = int(rng.integers(0, end))
        content[start : start + int(rng.integers(1, 9))] = rng.bytes(8)
        file.write_bytes(content)
        try:
            load_headers(file)
        except (CheckpointError, UnsupportedModelError):
            refused += 1
    assert refused > 300


def test_every_truncation_is_an_error(file):
    whole = file.read_bytes()
    for end in [*range(0, 64), *range(64, len(whole), 997), len(whole) - 40]:
        file.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"truncated|not a GGUF file"):
            load_headers(file)


@cache
def shapes_of(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    return Blank.of(config).shapes


def load_headers(file: Path) -> None:
    """What `load` checks before it reads weights."""
    source = source_of(file)
    config = source.config()
    found: list[str] = []
    source.tokenizer(found)
    with ExitStack() as stack:
        tensors, unreadable = source.open(stack, found)
        found += compare(tensors, unreadable, config, shapes_of(config), source.weights, source.described)
    if found:
        raise CheckpointError(file, found)

"""Saving and restoring through Orbax, also from one mesh to another, and the errors for folders that are refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import kvjax
from kvjax.checkpoint import load, restore, save, save_hf
from kvjax.checkpoint.parameters import by_path
from tests.checkpoint.folders import HF, WEIGHTS, assert_equal, decoder, problems


@pytest.fixture
def folder(tmp_path):
    save(decoder(), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.long(first=1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_saved_decoder_is_restored_in_its_own_dtype(tmp_path, dtype, tokenizer):
    params = decoder(dtype, tie_word_embeddings=True)
    save(params, tmp_path, tokenizer)
    restored, words = restore(str(tmp_path))
    assert_equal(restored, params)
    assert words is not None
    assert words("ba be")["input_ids"] == tokenizer("ba be")["input_ids"]
    assert {leaf.sharding.device_set.pop() for leaf in jax.tree.leaves(restored)} == {jax.devices()[0]}


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("sizes", [(8, 1), (2, 4), (1, 2)])
def test_restored_onto_another_mesh_and_cast(tmp_path, sizes):
    save(kvjax.shard(decoder(), kvjax.make_mesh(4, 2)), tmp_path)
    mesh = kvjax.make_mesh(*sizes)
    restored, none = restore(tmp_path, "bfloat16", mesh)
    assert none is None
    expected = kvjax.shard(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), decoder()), mesh)
    assert_equal(restored, expected)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert ours.sharding == theirs.sharding


def test_folder_that_is_not_empty(folder):
    with pytest.raises(ValueError, match=r"model is not empty, it holds config.json and 1 more: .* overwrite=True"):
        save(decoder(), folder)
    other = decoder(num_hidden_layers=1)
    save(other, folder, overwrite=True)
    assert_equal(restore(folder)[0], other)


@pytest.mark.long
def test_folders_of_another_kind_name_the_function_that_reads_them(folder, tmp_path, tiny):
    assert problems(load, folder) == ("it holds weights that kvjax.save wrote, which kvjax.restore reads",)
    save_hf(decoder(), tmp_path / "hf")
    assert problems(restore, tmp_path / "hf") == ("it holds weights in Hugging Face form, which kvjax.load reads",)
    kvjax.save_cache(tmp_path / "cache", kvjax.prefill(tiny, [[1, 2, 3]]), tiny)
    for read in (load, restore):
        assert problems(read, tmp_path / "cache") == ("it holds a cache, which kvjax.restore_cache reads",)
    assert problems(restore, tmp_path / "absent") == ("no such folder",)


def test_folder_without_config_or_arrays(folder, tmp_path):
    assert problems(restore, tmp_path) == ("it has no config.json",)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert problems(restore, tmp_path) == ("it has no params/, which kvjax.save writes",)
    (folder / "config.json").unlink()
    assert problems(restore, folder) == ("it has no config.json",)


def test_all_problems_are_listed_together(folder, tmp_path):
    arrays = by_path(decoder()) | {
        "stray": jnp.ones(1),
        "norm.scale": jnp.ones(17),
        "embed": np.ones((40, 16), np.int8),
    }
    del arrays["layers.1.mlp.up"]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / "params", args=ocp.args.PyTreeSave(arrays), force=True)
    assert problems(restore, folder) == (
        "missing array(s): layers.1.mlp.up",
        "unexpected array(s): stray",
        "embed has dtype int8; accepted: float32, bfloat16, float16",
        "norm.scale has shape (17,); config.json asks for (16,)",
    )


def test_config_of_another_model(folder):
    (folder / "config.json").write_text(json.dumps(HF | {"vocab_size": 44}))
    first, second = problems(restore, folder)
    assert "embed has shape (40, 16); config.json asks for (44, 16)" in first
    assert "unembed has shape" in second


@pytest.mark.parametrize("damage", ["metadata", "no metadata", "arrays", "no arrays"])
def test_damaged_folder(folder, damage):
    params = folder / "params"
    if damage == "metadata":
        (params / "_METADATA").write_text("{")
    elif damage == "no metadata":
        (params / "_METADATA").unlink()
    else:
        for file in (file for place in params.rglob("d") for file in place.iterdir()):
            file.unlink() if damage == "no arrays" else file.write_bytes(file.read_bytes()[:-40])
    (problem,) = problems(restore, folder)
    assert "params/" in problem


def test_dtype_and_mesh_that_are_not_accepted(folder):
    with pytest.raises(ValueError, match="dtype int8 is not supported; accepted: float32, bfloat16, float16"):
        restore(folder, "int8")
    with pytest.raises(ValueError, match="model=3 does not fit"):
        restore(folder, mesh=kvjax.make_mesh(model=3))


def test_no_safetensors_are_written(folder):
    assert not (folder / WEIGHTS).exists()

"""Saving in Hugging Face form: files of limited size, and folders that hold older weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import kvjax
from kvjax.attend.causal import causal
from kvjax.checkpoint import load, restore, save, save_hf
from tests.checkpoint.folders import INDEX, WEIGHTS, assert_equal, decoder


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parity
@pytest.mark.parametrize("sizes", [None, (2, 4)])
def test_transformers_reads_files_of_limited_size(tmp_path, sizes):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    params = decoder() if sizes is None else kvjax.shard(decoder(), kvjax.make_mesh(*sizes))
    save_hf(params, tmp_path, max_shard_bytes=8000)
    placed = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    files = sorted(set(placed.values()))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 1
    assert not (tmp_path / WEIGHTS).exists()
    for file in files:
        tensors = load_file(tmp_path / file)
        assert set(tensors) == {name for name in placed if placed[name] == file}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 8000
    assert_equal(load(tmp_path)[0], decoder())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    tokens = np.arange(12)[None] * 3
    hidden, _ = decoder()(tokens, causal(jnp.arange(12)[None]))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(decoder().logits(hidden), expected, atol=1e-5)


def test_old_weights_of_a_folder_are_removed(tmp_path):
    folder = tmp_path / "model"
    other = jax.tree.map(lambda leaf: leaf + 1, decoder())
    for params, size in ((other, 5_000), (decoder(), 9_000), (other, 10**9), (decoder(), 5_000)):
        save_hf(params, folder, max_shard_bytes=size, overwrite=True)
        assert_equal(load(folder)[0], params)
        files = {file.name for file in folder.iterdir()} - {"config.json", INDEX}
        assert files == (
            set(json.loads((folder / INDEX).read_text())["weight_map"].values()) if size < 10**9 else {WEIGHTS}
        )
    save(other, folder, overwrite=True)
    assert_equal(restore(folder)[0], other)
    assert {file.name for file in folder.iterdir()} == {"config.json", "params"}


@pytest.mark.parametrize("name", ["model-00001-of-000002", "model.safetensors-00001-of-00002", "model-1-of-2"])
def test_old_weights_have_the_names_of_published_ones(tmp_path, name):
    """DeepSeek's files have six digits, and Qwen3.5's another place for the ending."""
    (tmp_path / f"{name}.safetensors").write_bytes(b"old")
    (tmp_path / "model-card-1-of-2.safetensors").write_bytes(b"other")
    save_hf(decoder(), tmp_path, overwrite=True)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", WEIGHTS, "model-card-1-of-2.safetensors"}


def test_file_size_that_is_not_accepted(tmp_path):
    with pytest.raises(ValueError, match="max_shard_bytes=0: expected an integer >= 1"):
        save_hf(decoder(), tmp_path, max_shard_bytes=0)

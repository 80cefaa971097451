"""Loading parameters onto the devices of a mesh slice by slice, and saving them from there."""

from collections import Counter

import jax
import numpy as np
import pytest

import kvjax
from kvjax.checkpoint import load, restore, save, save_hf
from kvjax.mesh.sharding import fetch
from kvjax.models import Weight
from tests.checkpoint.folders import WEIGHTS, assert_equal, decoder


@pytest.fixture
def folder(tmp_path):
    save_hf(decoder(), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("sizes", [(8, 1), (4, 2), (2, 4), (1, 1)])
def test_slices_go_straight_to_the_devices_of_a_mesh(folder, sizes):
    mesh = kvjax.make_mesh(*sizes)
    sharded = kvjax.shard(decoder(), mesh)
    loaded, _ = load(folder, mesh=mesh)
    assert_equal(loaded, sharded)
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(sharded), strict=True):
        assert ours.sharding == theirs.sharding


FAMILIES = {
    "qwen2": {"model_type": "qwen2", "head_dim": None},  # biases
    "qwen3": {"model_type": "qwen3"},  # norms of heads
    "phi3": {"model_type": "phi3", "head_dim": None, "pad_token_id": None},  # fused
    "internlm2": {"model_type": "internlm2", "head_dim": None, "bias": True},  # fused by kv head, biases too
}


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("fields", FAMILIES.values(), ids=FAMILIES)
def test_fused_tensors_and_biases_of_every_family_on_a_mesh(tmp_path, fields):
    params = decoder(**fields)
    drawn = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda leaf: jax.random.normal(next(drawn), leaf.shape), params)  # biases and norms too
    sharded = kvjax.shard(params, kvjax.make_mesh(2, 4))
    save_hf(params, tmp_path / "whole")
    save_hf(sharded, tmp_path / "sharded")
    assert (tmp_path / "whole" / WEIGHTS).read_bytes() == (tmp_path / "sharded" / WEIGHTS).read_bytes()
    loaded, _ = load(tmp_path / "whole", mesh=kvjax.make_mesh(2, 4))
    assert_equal(loaded, params)
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(sharded), strict=True):
        assert ours.sharding == theirs.sharding
    save(sharded, tmp_path / "orbax")
    assert_equal(restore(tmp_path / "orbax", mesh=kvjax.make_mesh(4, 2))[0], params)


def test_each_slice_is_read_once(folder, monkeypatch):
    """On 2 x 4 devices, four hold the weights of each kv head, and eight those of a norm."""
    read = []
    monkeypatch.setattr(
        Weight,
        "read",
        lambda self, tensor, shape, index, dtype: (
            read.append((self.path, index))
            or np.ones([len(range(size)[part]) for size, part in zip(shape, index, strict=True)], dtype)
        ),
    )
    load(folder, mesh=kvjax.make_mesh(2, 4))
    counts = Counter(path.removeprefix("layers.0.") for path, _ in read if not path.startswith("layers.1."))
    assert counts["attention.key"] == 2
    assert counts["attention.query"] == counts["mlp.up"] == counts["embed"] == counts["unembed"] == 4
    assert counts["attention_norm.scale"] == 1


def test_saving_keeps_no_copies_of_weights_on_the_host():
    sharded = kvjax.shard(decoder(), kvjax.make_mesh(2, 4))
    for leaf in jax.tree.leaves(sharded):
        np.testing.assert_array_equal(fetch(leaf), np.asarray(leaf.copy()))
        assert leaf._npy_value is None

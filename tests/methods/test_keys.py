"""Scores of keys alone against NumPy, and random draws, which belong to a token whatever slot it is in."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import kvjax
from kvjax.cache import Slots
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.models import AttentionLayer, Rope
from kvjax.parts import KeyDifference, KeyNorm, RandomDraw
from kvjax.policies import random
from kvjax.policy import Moment

B, H, M, D = 3, 2, 9, 8


def entries_of(rng, dtype=jnp.float32, empty=3):
    """Random entries in random slots. Some slots are empty, with keys large enough to show up if they counted."""
    positions = rng.permuted(np.broadcast_to(np.arange(M) - empty, (B, H, M)), axis=-1)
    positions = np.maximum(positions, -1)
    keys = np.where(positions[..., None] < 0, 100, rng.normal(size=(B, H, M, D)) + 1).astype(np.float32)
    values = rng.normal(size=(B, H, M, D)).astype(np.float32)
    return Slots(*(jnp.asarray(x, dtype) for x in (keys, values)), jnp.asarray(positions), jnp.full((B, H), M))


def moment(index=0, heads=ALL_HEADS):
    return Moment(jnp.full(B, M), AttentionLayer(index, Rope(1e4), None, 1.0, jnp.zeros((H, D, 1))), heads=heads)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_and_differences_of_keys(dtype):
    entries = entries_of(np.random.default_rng(0), dtype)
    norms, differences = (np.asarray(score(entries, moment())) for score in (KeyNorm(), KeyDifference()))
    assert norms.dtype == differences.dtype == np.float32
    for b, h in np.ndindex(B, H):
        there = np.asarray(entries.positions[b, h]) >= 0
        keys = np.asarray(entries.keys[b, h].astype(jnp.float32), np.float64)[there]
        lengths = np.linalg.norm(keys, axis=-1)
        np.testing.assert_allclose(norms[b, h][there], -lengths, rtol=1e-6)
        anchor = np.mean(keys / lengths[:, None], axis=0)
        cosines = keys @ anchor / (lengths * np.linalg.norm(anchor))
        np.testing.assert_allclose(differences[b, h][there], -cosines, atol=1e-6)


def test_a_draw_belongs_to_a_token_a_head_and_a_layer():
    score, entries = RandomDraw(seed=4), entries_of(np.random.default_rng(1))
    draws = np.asarray(score(entries, moment()))
    lines = zip(np.asarray(entries.positions).reshape(-1, M), draws.reshape(-1, M), strict=True)
    by_token = [{int(p): x for p, x in zip(*line, strict=True) if p >= 0} for line in lines]
    assert by_token[0] == by_token[2] == by_token[4], "the same in every row and in any slot"
    assert by_token[1] == by_token[3]
    others = [score(entries, moment(index=1)), RandomDraw(5)(entries, moment())]
    firsts = [by_token[0][3], by_token[1][3], *(float(x[0, 0][entries.positions[0, 0] == 3][0]) for x in others)]
    assert len(set(firsts)) == 4, "another draw for another head, layer and seed"


def test_draws_are_uniform():
    positions = jnp.arange(4000).reshape(1, 1, -1)
    entries = Slots(jnp.zeros((1, 1, 4000, 1)), jnp.zeros((1, 1, 4000, 1)), positions, jnp.ones((1, 1)))
    draws = np.sort(np.asarray(RandomDraw()(entries, moment()))[0, 0])
    assert np.max(np.abs(draws - np.arange(4000) / 4000)) < 1.63 / np.sqrt(4000), "Kolmogorov and Smirnov at 1 %"


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_draws_are_those_of_one_device():
    entries = entries_of(np.random.default_rng(2))
    cut = PartitionSpec(None, "model")

    @partial(jax.shard_map, mesh=kvjax.make_mesh(4, 2), in_specs=cut, out_specs=cut, check_vma=False)
    def draw(entries):
        return RandomDraw()(entries, moment(heads=Heads(kv_axis="model")))

    np.testing.assert_array_equal(draw(entries), RandomDraw()(entries, moment()))


@pytest.mark.parametrize("seed", [-1, 0.5, True])
def test_bad_seeds(seed):
    with pytest.raises(ValueError, match=r"seed=.*: expected an integer >= 0"):
        random(seed=seed)

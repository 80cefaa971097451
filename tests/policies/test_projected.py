"""CriticalKV's score against its two stages in NumPy."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import kvjax
from kvjax.cache import LayerCache
from kvjax.heads import ALL_HEADS, Heads
from kvjax.models import AttentionLayer, Rope
from kvjax.parts import KeyNorm, ProjectedValues, Recency
from kvjax.policies import parse
from kvjax.policy import Protect
from kvjax.protocols import Moment

B, H, G, M, D, E = 3, 2, 3, 80, 4, 12


def drawn(group=G):
    """Rows of different lengths with capacities of their own, in any order of slots, and an output projection."""
    rng = np.random.default_rng(0)
    keys, values = (rng.normal(size=(B, H, M, D)).astype(np.float32) for _ in range(2))
    positions = np.full((B, H, M), -1)
    for b, length in enumerate((80, 50, 9)):
        for h in range(H):
            positions[b, h, rng.permutation(M)[:length]] = rng.permutation(length)
    capacity = np.array([[30, 31], [20, 12], [12, 40]])
    output = rng.normal(size=(H * group, D, E)).astype(np.float32)
    return LayerCache(*map(jnp.asarray, (keys, values, positions, capacity))), jnp.asarray(output)


def moment(output, protected=None, heads=ALL_HEADS):
    layer = AttentionLayer(0, Rope(1e4), None, 1.0, output)
    return Moment(jnp.full(B, M), layer, heads=heads, protected=protected)


@pytest.mark.parametrize("group", [1, G])
@pytest.mark.parametrize("first", [0.0, 0.5, 0.9])
def test_two_stages(first, group):
    entries, output = drawn(group)
    protected = Protect(recent=4).mask(entries.positions, jnp.array([80, 50, 9]), entries.capacity)
    part = ProjectedValues(KeyNorm(), first, 0.01)
    scores = np.asarray(part(entries, moment(output, protected)))
    base = np.asarray(KeyNorm()(entries, moment(output)))
    for b, h in np.ndindex(B, H):
        there = np.flatnonzero(entries.positions[b, h] >= 0)
        value, weights = np.asarray(entries.values[b, h, there], np.float64), np.asarray(output, np.float64)
        norms = np.mean([np.abs(value @ weights[h * group + g]).sum(axis=-1) for g in range(group)], axis=0)
        weighed = (base[b, h, there] + 0.01) * norms
        order = np.argsort(-np.where(protected[b, h, there], np.inf, base[b, h, there]), kind="stable")
        chosen = order[: min(int(first * entries.capacity[b, h] + 1e-4), len(there))]
        rest = np.setdiff1d(np.arange(len(there)), chosen)
        got = scores[b, h, there]
        np.testing.assert_allclose(got[rest], weighed[rest], rtol=1e-5)
        if len(chosen) and len(rest):
            assert got[chosen].min() > got[rest].max()


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_devices_that_share_a_kv_head_score_alike():
    entries, output = drawn(group=4)
    mesh = jax.make_mesh((2, 4), ("model", "replica"), axis_types=(AxisType.Auto,) * 2)
    by_kv, by_query = PartitionSpec(None, "model"), PartitionSpec(("model", "replica"))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(by_kv, by_query), out_specs=by_kv, check_vma=False)
    def score(entries, output):
        return ProjectedValues(Recency())(entries, moment(output, heads=Heads("model", "replica")))

    expected = ProjectedValues(Recency())(entries, moment(output))
    np.testing.assert_allclose(score(entries, output), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("first=1.0", r"first=1.0: accepted is a float in \[0, 1\)"),
        ("first=1", "first=1: accepted is a float"),
        ("first=-0.1", "first=-0.1"),
        ("epsilon=-1.0", "epsilon=-1.0: accepted is a float >= 0"),
        ("base=criticalkv", "ProjectedValues of ProjectedValues.*another base"),
        ("base=expected_attention", "ProjectedValues of an ExpectedAttention.*value_norm=False"),
        ("base=tova", "LastAttention.*ProjectedValues.*cannot be combined"),
    ],
)
def test_what_makes_no_sense(text, says):
    with pytest.raises(ValueError, match=says):
        parse(f"criticalkv:{text}")


def test_what_the_base_refuses_is_refused():
    policy = kvjax.policies.criticalkv()
    for change, says in (
        ({"every": 1}, r"Pool\(.*every=1"),
        ({"protect": Protect()}, "WindowAttention scores what is older"),
        ({"positions": "in_cache"}, "ProjectedValues stores rotated queries"),
    ):
        with pytest.raises(ValueError, match=says):
            kvjax.Policy(**{**vars(policy), **change})

"""What holds for every storage that settles a prompt into entries of another form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.inspection import record
from kvjax.policies import parse
from tests import tiny
from tests.attend import meshes
from tests.products import each_once

SPECS = ("think:ratio=0.5,window=4,recent=4", "zipcache:window=4,queries=4")
ROWS = [np.random.default_rng(2).integers(0, tiny.VOCAB, n) for n in (40, 5, 23)]


def over(spec: str, base: str) -> kvjax.Policy:
    """The policy of a spec over a base, whose options follow a comma."""
    name, *options = base.split(",")
    return parse(",".join([spec, f"base={name}", *(f"base.{option}" for option in options)]))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "base"), each_once(SPECS, ["snapkv,budget=24,window=4", "full"]))
def test_memory_held_is_what_was_planned(spec: str, base: str) -> None:
    """Of a model with a layer that has a sliding window, and keeps its entries as they are."""
    params, policy = tiny.decoder(windows=(None, 12)), over(spec, base)
    sizes = {"batch": 3, "length": 40, "new_tokens": 9, "dtype": np.float32}
    answer = kvjax.generate(params, ROWS, policy=policy, max_new_tokens=9)
    planned = kvjax.plan_cache(params.config, policy, **sizes)
    assert jax.tree.map(jnp.shape, answer.cache.entries) == jax.tree.map(jnp.shape, planned.entries)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(answer.cache.entries))
    assert held == planned.nbytes == answer.cache.nbytes
    assert held < kvjax.plan_cache(params.config, parse(base.replace(",", ":", 1)), **sizes).nbytes


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(("spec", "data", "model"), each_once(SPECS, [(2, 4), (4, 2)]))
def test_on_a_mesh(spec: str, data: int, model: int) -> None:
    """With two kv heads, devices of the first mesh share each, and have a part of its query group."""
    params, policy = tiny.decoder(meshes.HEADS, 2), over(spec, "snapkv,budget=24,window=4")
    ours, theirs = (
        kvjax.generate(x, meshes.ROWS, policy=policy, max_new_tokens=12, log_probs=True)
        for x in (meshes.sharded(data, model, 2), params)
    )
    meshes.assert_equal(ours, theirs)
    assert ours.cache.nbytes == theirs.cache.nbytes
    for leaf in jax.tree.leaves(ours.cache.entries[0].settled):
        assert leaf.addressable_shards[0].data.shape[:2] == (8 // data, 1)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_settled_entries_are_seen_by_inspection_and_counted(spec: str) -> None:
    """Merged entries of the prompt are followed as under the base, and no entry leaves."""
    params, base = tiny.decoder(), "kvmerger,budget=12,recent=4,merge.heavy=2,merge.theta=None"
    policies = over(spec, base), parse(base.replace(",", ":", 1))
    ours, theirs = (record(params, ROWS[0], policy=policy, max_new_tokens=3) for policy in policies)
    np.testing.assert_array_equal(ours.left[..., :40], theirs.left[..., :40])
    assert ours.into is not None
    assert theirs.into is not None
    np.testing.assert_array_equal(ours.into[..., :40], theirs.into[..., :40])
    assert (theirs.into[..., :40] >= 0).any()
    held, expected = (kvjax.prefill(params, ROWS, policy=policy).entries.held() for policy in policies)
    np.testing.assert_array_equal(held, expected)
    planned = kvjax.plan_cache(params.config, policies[0], batch=1, length=40, new_tokens=9, dtype=np.float32)
    assert planned.entries.mean_slots == (12 + 64,)

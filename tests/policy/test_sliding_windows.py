"""Allocated budgets in models with sliding windows, whose layers have no more entries than their window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.cache import Segments
from kvjax.kv_cache import KVCache
from kvjax.parts import GatedShares, GlobalShares
from tests import tiny
from tests.policy.presets import ALL, layers_of
from tests.products import part

WINDOW, LENGTHS, NEW = 8, (61, 40, 11), 30
RNG = np.random.default_rng(8)
ROWS = [RNG.integers(0, tiny.VOCAB, length).tolist() for length in LENGTHS]


def pool_of(cache: KVCache) -> Segments:
    """The cache's pool, whose segments lie one behind the other in their lanes."""
    pool = cache.entries
    assert isinstance(pool, Segments)
    rows, heads = pool.start[0].shape
    shape = (len(pool), rows, pool.lanes, heads // pool.lanes)

    def in_order(each: Sequence[Any]) -> np.ndarray:
        return np.moveaxis(np.stack(each).reshape(shape), 0, 2).reshape(rows, pool.lanes, -1)

    starts, sizes = in_order(pool.start), in_order(pool.size)
    ends = np.cumsum(sizes, axis=-1)
    np.testing.assert_array_equal(starts, ends - sizes)
    assert ends.max() <= pool.positions.shape[2]
    return pool


ALLOCATED = [spec for spec in ALL if policies.parse(spec).allocates]
ALLOCATED += ["d2o:budget=0.5,dense_first=1,dense_last=0", "d2o:budget=12,dense_first=0,dense_last=1"]
KINDS = (
    "dynamickv:budget=0.5",
    "adakv:base=h2o",
    "kvzip:budget=0.5",
    "headkv:budget=12",
    "lukv:base=h2o",
)


@pytest.mark.long(first=1)
@pytest.mark.parametrize("spec", part(ALLOCATED, [spec for spec in ALLOCATED if spec.startswith(KINDS)]))
def test_a_budget_counts_no_more_than_a_window(spec: str) -> None:
    """What a prompt retains is within the budget, of which every second layer has its window; a short one stays.

    An answer of several windows fits, and the cache has the bytes of its plan.
    """
    policy, layers = policies.parse(spec), layers_of(spec, 2)
    gates = bool(policy.learned or policy.score.needs.gates or policy.score.needs.statistics)
    model = tiny.decoder(8, windows=(WINDOW, None) * (layers // 2), gates=gates)
    heads, budget = model.config.num_kv_heads, policy.budget
    cache = kvjax.prefill(model, ROWS, policy=policy)
    pool_of(cache)
    for row, length in enumerate(LENGTHS):
        mean = int(policy.capacity(0, np.array([length]), layers)[0])
        means, sizes = ([min(x, WINDOW), x] * (layers // 2) for x in (mean, length))
        held = tiny.held(cache, row)
        counts = np.array([[len(head) for head in layer] for layer in held]) - policy.learned_count
        lanes = budget.layout.lanes(heads)
        total = budget.entries(means, sizes, heads // lanes)
        assert (counts.reshape(layers, lanes, -1).sum(axis=(0, 2)) <= total).all()
        if length + policy.learned_count <= mean and not isinstance(budget, GatedShares):
            assert (counts == np.array([WINDOW - 1, length] * (layers // 2))[:, None]).all()
        elif type(budget) is GlobalShares and not budget.strict:
            assert counts.sum() == total * lanes
    answer = kvjax.generate(model, ROWS, policy=policy, max_new_tokens=NEW, eos=())
    pool_of(answer.cache)
    plan = kvjax.plan_cache(
        model.config, policy, batch=len(ROWS), length=max(LENGTHS), new_tokens=NEW, dtype=np.float32
    )
    assert answer.cache.nbytes == plan.nbytes

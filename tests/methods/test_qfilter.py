"""Q-Filters against their equation in NumPy; tests/methods/test_kvpress.py has kvpress's selections."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models import AttentionLayer, Rope
from kvjax.parts import Moment, QueryFilter
from kvjax.policies import qfilter
from tests import tiny
from tests.methods import one_layer, saved_statistics

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,sinks=1,recent=2", "budget=12,recent=2,every=3", "budget=0.5")


def test_a_worked_example():
    """The filter (-1, 2) gives the keys (3, 1) and (0, 1) the scores 3 - 2 and -2."""
    statistics = {"q_filters": jnp.array([[-1.0, 2.0]])}
    layer = AttentionLayer(0, Rope(1e4), None, 1.0, jnp.zeros((2, 2, 1)), statistics=statistics)
    entries = one_layer.entries_at([[0, 1]], np.array([[[3.0, 1.0], [0.0, 1.0]]]), np.zeros((1, 2, 2)))
    np.testing.assert_array_equal(QueryFilter()(entries, Moment(jnp.array([2]), layer))[0, 0], [1.0, -2.0])


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("group", "every"), [(1, None), (4, 3), (7, 1)])
def test_heads_hold_what_the_equation_retains(group, every):
    params, statistics = saved_statistics.decoder(group)

    def score(h, keys, values, positions, now):
        return -keys @ statistics["q_filters"][h]

    policy = f"qfilter:budget=10,sinks=1,recent=2,every={every}"
    saved_statistics.assert_follows(params, policy, score, budget=10, sinks=1, recent=2, every=every)


def test_refusals():
    params = tiny.decoder()
    with pytest.raises(
        ValueError, match=r"QueryFilter\(\) reads the statistics q_filters, and the parameters have none"
    ):
        kvjax.prefill(params, [[1, 2, 3]], policy=qfilter(2))
    with pytest.raises(ValueError, match=r"QueryFilter: it projects keys .* positions='in_cache'"):
        replace(qfilter(4), positions="in_cache")

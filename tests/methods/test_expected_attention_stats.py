"""Expected attention with saved statistics in NumPy; tests/methods/test_kvpress.py has kvpress's selections."""

from __future__ import annotations

import numpy as np
import pytest

import kvjax
from kvjax.policies import expected_attention_stats, parse
from tests import tiny
from tests.methods import saved_statistics
from tests.methods.reference import rotated, softmax

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = (
    "budget=12,sinks=2,future=8,epsilon=0.01",
    "budget=12,sinks=1,future=4,every=3",
    "budget=0.5,sinks=0,covariance=False,value_norm=False",
)
SINKS, FUTURE, EPSILON = 2, 5, 0.02


def turn(now, dim):
    """The mean RoPE matrix of the next positions."""
    return np.mean([rotated(np.eye(dim), now + t, 1e4).T for t in range(FUTURE)], axis=0)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "every"), [(1, 3), (4, None), (7, 1)])
def test_heads_hold_what_the_equation_retains(group, every):
    params, statistics = saved_statistics.decoder(group)

    def score(h, keys, values, positions, now):
        dim, total = keys.shape[1], 0
        scored = positions >= SINKS
        mean_turn = turn(now, dim)
        for g in range(h * group, (h + 1) * group):
            mean = mean_turn @ statistics["query_mean"][g]
            covariance = mean_turn @ statistics["query_cov"][g] @ mean_turn.T
            logits = keys @ mean * dim**-0.5 + np.einsum("nd,de,ne->n", keys, covariance, keys) / dim / 2
            weights = softmax(np.where(scored, logits, -np.inf)) if scored.any() else np.zeros(len(keys))
            total = total + np.where(scored, weights, 0)
        return (total / group + EPSILON) * np.linalg.norm(values, axis=1)

    policy = f"expected_attention_stats:budget=10,sinks={SINKS},future={FUTURE},epsilon={EPSILON},every={every}"
    saved_statistics.assert_follows(params, policy, score, budget=10, sinks=SINKS, recent=0, every=every)


def test_the_statistics_of_a_prompt_give_what_expected_attention_retains():
    """`expected_attention` measures the same of the prompt itself, with the denominator n."""
    params, text = tiny.decoder(8, 2), saved_statistics.ROWS[0]
    seen = []

    def record(layer, q, k, v, cache):
        seen.append(np.asarray(q[0], np.float64))
        return q, cache

    params(np.asarray(text)[None], record)
    queries = seen[0][:, SINKS:]
    mean = queries.mean(axis=1)
    apart = queries - mean[:, None]
    covariance = np.einsum("hnd,hne->hde", apart, apart) / queries.shape[1]
    measured = kvjax.with_statistics(params, {"query_mean": mean[None], "query_cov": covariance[None]})
    options = f"budget=12,sinks={SINKS},future={FUTURE}"
    own, saved = (
        kvjax.prefill(measured, [text], policy=parse(f"{name}:{options}"))
        for name in ("expected_attention", "expected_attention_stats")
    )
    assert tiny.held(own, 0) == tiny.held(saved, 0)


def test_parameters_without_both_statistics_are_refused():
    params = tiny.decoder()
    config = params.config
    params = kvjax.with_statistics(params, {"query_mean": np.zeros((1, config.num_heads, config.head_dim))})
    with pytest.raises(
        ValueError, match="reads the statistics query_cov, and the parameters have query_mean: expected"
    ):
        kvjax.prefill(params, [[1, 2, 3]], policy=expected_attention_stats(8))

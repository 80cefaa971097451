"""Window scores in XLA against reductions of float64 attention weights."""

import importlib
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Reduction, window_scores
from tests.dense import assert_close, attention, compiled, entries, left_padded
from tests.pallas_kernels.cases import WINDOW_CASES, Case
from tests.pallas_kernels.checks import check_window, jitted, reduced

xla = importlib.import_module("kvjax.pallas_kernels.window_scores.xla")
REDUCTIONS = [
    Reduction(*choice)
    for choice in itertools.product(("sum", "mean", "max"), ("sum", "mean", "max"), ("rows", "group"))
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "BLOCK_Q", 8)
    monkeypatch.setattr(xla, "BLOCK_K", 16)
    monkeypatch.setattr(xla, "TILE_LOGITS", 1)


def problem(rng, group, queries, slots, dtype=np.float32):
    """Row 0 has the last queries of a prompt, row 1 has three queries after padding, and row 2 has no query."""
    k, _, p = entries(rng, 3, 2, slots, [60, 11, 30], dtype)
    q = rng.normal(size=(3, 2 * group, queries, 8)).astype(dtype)
    t = left_padded([queries, min(3, queries), 0], queries, [40, 8, 0])
    return q, k, t, p


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: f"{r.first}_first-rows_{r.rows}-group_{r.group}")
def test_every_reduction_in_both_orders(reduction):
    rng = np.random.default_rng(0)
    q, k, t, p = problem(rng, 4, 13, 37)
    window, lse_given = (None, True) if reduction.first == "rows" else (9, False)
    weights, lse, visible = attention(q, k, t, p, 0.5, window)
    lse = lse.astype(np.float32) if lse_given else None
    got = compiled(window_scores, q, k, t, p, scale=0.5, window=window, reduction=reduction, lse=lse)
    assert_close(got, reduced(weights, visible, reduction))
    assert not np.any(got[2]), "a row without queries scores 0"


@pytest.mark.parametrize(("queries", "slots"), [(1, 5), (8, 16), (40, 40), (3, 33)])
@pytest.mark.parametrize("group", [1, 7])
def test_groups_and_sizes_that_do_not_fit_the_tiles(group, queries, slots):
    rng = np.random.default_rng(group + queries)
    q, k, t, p = problem(rng, group, queries, slots)
    reduction = Reduction("mean", "max", "group")
    weights, _, visible = attention(q, k, t, p, 0.5)
    assert_close(
        compiled(window_scores, q, k, t, p, scale=0.5, reduction=reduction), reduced(weights, visible, reduction)
    )


@pytest.mark.parametrize(
    "case",
    [Case(64, 8, 64, 90, causal=False), Case(64, 4, 3, 64, bias="none", lse=False)]
    + [case for case in WINDOW_CASES if case.softcap],
    ids=str,
)
def test_soft_caps_newer_queries_than_all_keys_and_biases_of_minus_infinity(case):
    check_window(jitted(window_scores), case)


def test_queries_in_ring_order_and_keys_left_out_of_the_scoring():
    """A policy passes queries in ring order, and a log-sum-exp over more keys than are scored."""
    rng = np.random.default_rng(5)
    q, k, t, p = problem(rng, 2, 12, 40)
    weights, lse, visible = attention(q, k, t, p, 0.5)
    distant = np.where(p < 30, p, -1)
    order = np.roll(np.arange(12), 5)
    got = compiled(
        window_scores, q[:, :, order], k, t[:, order], distant, scale=0.5, lse=lse[:, :, order].astype(np.float32)
    )
    expected = reduced(np.where((distant >= 0).repeat(2, 1)[:, :, None], weights, 0), visible, Reduction())
    assert_close(got, expected)
    alone = compiled(window_scores, q[:, :, order], k, t[:, order], distant, scale=0.5)
    weights, _, visible = attention(q, k, t, distant, 0.5)
    assert_close(alone, reduced(weights, visible, Reduction()))


@pytest.mark.parametrize("lse_given", [True, False])
def test_a_bias_is_added_to_the_logits_of_its_key(lse_given):
    rng = np.random.default_rng(8)
    q, k, t, p = problem(rng, 4, 13, 37)
    bias = rng.normal(size=p.shape).astype(np.float32)
    weights, lse, visible = attention(q, k, t, p, 0.5, bias=bias)
    lse = lse.astype(np.float32) if lse_given else None
    got = compiled(window_scores, q, k, t, p, scale=0.5, bias=bias, lse=lse)
    assert_close(got, reduced(weights, visible, Reduction()))


def test_bfloat16_and_huge_logits():
    rng = np.random.default_rng(6)
    q, k, t, p = problem(rng, 2, 13, 37, jnp.bfloat16)
    weights, _, visible = attention(q, k, t, p, 0.25)
    got = compiled(window_scores, jnp.asarray(q), jnp.asarray(k), t, p, scale=0.25)
    assert got.dtype == jnp.float32
    assert_close(got, reduced(weights, visible, Reduction()))
    q, k, t, p = problem(rng, 2, 13, 37)
    q, k = 64 * np.round(2 * q), 64 * np.round(2 * k)
    weights, lse, visible = attention(q, k, t, p, 0.5)
    assert np.abs(lse[np.isfinite(lse)]).max() > 1e4
    # float32 rounds a log-sum-exp of 1e4 to 1e-3.
    assert_close(compiled(window_scores, q, k, t, p, scale=0.5), reduced(weights, visible, Reduction()), 1e-3, 2e-3)


def test_all_queries_of_a_causal_prompt_give_all_their_weight(monkeypatch):
    """With several tiles of the default sizes. Scores are column sums, and each row of weights sums to one."""
    monkeypatch.undo()
    rng = np.random.default_rng(7)
    q, k = rng.normal(size=(2, 1, 2, 600, 8)).astype(np.float32)
    t = np.arange(600)[None]
    got = compiled(window_scores, q, k, t, t[:, None].repeat(2, 1), scale=0.35)
    weights, _, _ = attention(q, k, t, t[:, None].repeat(2, 1), 0.35)
    assert_close(got, weights.sum(axis=2))
    np.testing.assert_allclose(got.sum(axis=-1), 600, rtol=1e-5)


@pytest.mark.parametrize("options", [{"rows": "median"}, {"group": "logits"}, {"first": "keys"}])
def test_unknown_reductions_are_refused_by_name(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}='{value}': expected"):
        Reduction(**options)

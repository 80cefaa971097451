"""Slot attention in XLA against float64 softmax attention."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import slot_attention, use
from tests.dense import assert_close, attention, context, entries
from tests.pallas_kernels.cases import EXTRA_CASES, SLOT_CASES, THIN_CASES, Case, quantized
from tests.pallas_kernels.checks import FOLDS, check_extra, check_slots, jitted, plainly, received
from tests.products import part


def with_every_fold(*arrays, **options):
    """The context and the log-sum-exp, what slots receive by each fold, and what is returned if nothing is asked."""
    results = [slot_attention(*arrays, **options, received=kind) for kind in FOLDS]
    return *results[-1][:2], [result.received for result in results], slot_attention(*arrays, **options)[2:]


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_attends_to_slots_in_any_order(group, queries, window):
    rng = np.random.default_rng(group + queries)
    k, v, p = entries(rng, 3, 2, 19, [40, 9, 4])
    t = np.array([[40], [9], [-1]]) + np.where(np.arange(queries) > 0, 2 * np.arange(queries), 0)
    t[2] = -1  # a finished row
    q = rng.normal(size=(3, 2 * group, queries, 8)).astype(np.float32)
    weights, expected_lse, _ = attention(q, k, t, p, 0.5, window)
    out, lse, folded, nothing = jitted(with_every_fold)(q, k, v, t, p, scale=0.5, window=window)
    assert_close(out, context(weights, v))
    assert_close(lse, expected_lse)
    for kind, got in zip(FOLDS, folded, strict=True):
        assert_close(got, received(weights, 2, kind))
        assert not np.any(got[2])
    assert not np.any(out[2])
    assert nothing == (None, None)


def test_a_bias_is_added_to_the_logits_of_its_slot():
    rng = np.random.default_rng(8)
    k, v, p = entries(rng, 2, 2, 19, [40, 9])
    q, bias = rng.normal(size=(2, 8, 3, 8)).astype(np.float32), rng.normal(size=(2, 2, 19)).astype(np.float32)
    t = np.array([[30, 35, 40], [7, 8, 9]])
    out, lse, got, _ = jitted(slot_attention)(q, k, v, t, p, scale=0.5, bias=bias, received="sum")
    weights, expected_lse, _ = attention(q, k, t, p, 0.5, bias=bias)
    assert_close(out, context(weights, v))
    assert_close(lse, expected_lse)
    assert_close(got, received(weights, 2, "sum"))


@pytest.mark.parametrize(
    "case",
    [Case(64, 4, 3, 64, bias="none"), Case(64, 2, 64, 90, received="mean"), Case(64, 1, 20, 33, window=25)]
    + [case for case in SLOT_CASES if case.softcap],
    ids=str,
)
def test_soft_caps_biases_of_minus_infinity_and_padding_among_many_queries(case):
    check_slots(jitted(slot_attention), case)


@pytest.mark.parametrize("case", [case for case in THIN_CASES if case.dtype == "float32"], ids=str)
def test_keys_of_fewer_channels_than_values(case):
    check_slots(jitted(slot_attention), case)


@pytest.mark.parametrize("backend", ["mosaic_gpu", "mosaic_tpu"])
def test_keys_of_fewer_channels_than_values_are_refused_by(backend):
    q, k, v, t, p, _ = THIN_CASES[0].arrays
    with (
        use(f"{backend}-interpret"),
        pytest.warns(UserWarning, match="keys of 77 channels and values of 128: expected"),
    ):
        out, *_ = slot_attention(q, k, v, t, p, scale=0.5)
    assert out.shape == (3, 8, 1, 128)


OF_FLOAT32 = [case for case in EXTRA_CASES if case[0].dtype == "float32"]


# The scores are those of `window_scores`, whose tests try all reductions.
@pytest.mark.parametrize(
    ("case", "count", "reduction"),
    part(OF_FLOAT32, [case for case in OF_FLOAT32 if case[0].bias is not None or case[1] == 150]),
)
def test_extra_query_rows(case, count, reduction):
    check_extra(jitted(slot_attention), case, count, reduction)


@pytest.mark.parametrize(("bits", "per_scale"), [(8, 8), (8, 2), (4, 4), (4, 8)])
def test_quantised_entries_give_the_results_of_their_numbers(bits, per_scale):
    rng = np.random.default_rng(bits)
    k, v, p = entries(rng, 2, 2, 19, [40, 9])
    codes = [quantized(x, bits, per_scale) for x in (k, v)]
    numbers = [plainly(x) for x in codes]
    q, t = rng.normal(size=(2, 8, 1, 8)).astype(np.float32), np.array([[40], [9]])
    with use("xla"):
        attend = jitted(slot_attention, scale=0.5, received="max")
        got, same = (attend(q, *stored, t, p)[:3] for stored in (codes, numbers))
    for x, y in zip(got, same, strict=True):
        assert_close(x, y, 1e-6, 1e-6)  # a GPU may fuse a code's product with its scale into the next operation
    weights, expected_lse, _ = attention(q, numbers[0], t, p, 0.5)
    assert_close(got[0], context(weights, np.asarray(numbers[1])))
    assert_close(got[1], expected_lse)


def test_bfloat16_is_as_accurate_as_its_inputs():
    rng = np.random.default_rng(3)
    k, v, p = entries(rng, 2, 2, 33, [60, 60], jnp.bfloat16)
    q = rng.normal(size=(2, 8, 1, 8)).astype(jnp.bfloat16)
    t = np.array([[60], [60]])
    out, lse, got, _ = jitted(slot_attention)(q, k, v, t, p, scale=0.25, received="sum")
    weights, expected_lse, _ = attention(q, k, t, p, 0.25)
    assert (out.dtype, lse.dtype, got.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    assert_close(out, context(weights, v), 1e-2, 2e-2)
    assert_close(lse, expected_lse)
    assert_close(got, received(weights, 2, "sum"))


def test_huge_logits_neither_overflow_nor_vanish():
    rng = np.random.default_rng(4)
    k, v, p = entries(rng, 2, 2, 33, [60, 60])
    q = 64 * np.round(2 * rng.normal(size=(2, 4, 1, 8))).astype(np.float32)
    k = 64 * np.round(2 * k)
    t = np.array([[60], [60]])
    out, lse, got, _ = jitted(slot_attention)(q, k, v, t, p, scale=0.5, received="max")
    weights, expected_lse, _ = attention(q, k, t, p, 0.5)
    assert np.abs(expected_lse).max() > 1e4
    assert_close(out, context(weights, v))
    assert_close(lse, expected_lse)
    assert_close(got, received(weights, 2, "max"))

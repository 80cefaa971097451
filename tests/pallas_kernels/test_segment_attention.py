"""Segment attention in XLA against float64 softmax attention over each head's own entries."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import PAGE, Reduction
from kvjax.pallas_kernels.segment_attention.xla import segment_attention
from tests.dense import assert_close, attention, context
from tests.pallas_kernels.cases import SEGMENT_CASES, quantized
from tests.pallas_kernels.checks import check_segments, jitted, plainly
from tests.products import each_once

ROUNDING = (1e-6, 1e-6)  # a GPU may fuse a code's product with its scale into the next operation
attend = jitted(segment_attention)
LENGTHS = np.array([[0, 5, 700, 16], [300, 0, 0, 1], [40, 41, 42, 43]])  # entries per segment: 3 batch rows, 4 kv heads


def pool(rng, lanes, dtype=np.float32):
    """Returns (k, v, positions, start, [k, v, positions] per head as [B, H, S, ...]). Empty rows hold noise."""
    B, H = LENGTHS.shape
    S, J = LENGTHS.max(), H // lanes
    sizes = -(-LENGTHS // PAGE) * PAGE + PAGE * (np.arange(H) % 2)  # some segments have empty rows
    T = sizes.reshape(B, lanes, J).sum(-1).max() + PAGE
    k, v = (rng.normal(size=(B, lanes, T, 8)).astype(dtype) for _ in range(2))
    positions = rng.integers(0, 50, (B, lanes, T)).astype(np.int32)
    start = np.zeros((B, H), np.int32)
    dense = [np.zeros((B, H, S, 8), dtype), np.zeros((B, H, S, 8), dtype), np.full((B, H, S), -1)]
    for b in range(B):
        for h in range(H):
            start[b, h] = sizes[b, h // J * J : h].sum()
            place = slice(start[b, h], start[b, h] + LENGTHS[b, h])
            positions[b, h // J, place] = rng.permutation(LENGTHS[b, h]) - (rng.random(LENGTHS[b, h]) < 0.1) * 1000
            positions[b, h // J] = np.maximum(positions[b, h // J], -1)
            for of_head, x in zip(dense, (k, v, positions), strict=True):
                of_head[b, h, : LENGTHS[b, h]] = x[b, h // J, place]
    return k, v, positions, start, dense


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("group", "queries", "lanes", "window"),
    each_once([(1, 1, 4), (4, 3, 1), (7, 1, 2), (2, 2, 1)], [None, 60]),
)
def test_each_head_attends_to_its_own_segment(group, queries, lanes, window):
    rng = np.random.default_rng(group)
    k, v, positions, start, (dense_k, dense_v, dense_p) = pool(rng, lanes)
    t = np.array([[720], [310], [-1]]) + np.where(np.arange(queries) > 0, np.arange(queries), 0)
    t[2] = -1  # a finished row
    q = rng.normal(size=(3, 4 * group, queries, 8)).astype(np.float32)
    weights, expected_lse, _ = attention(q, dense_k, t, dense_p, 0.5, window)
    out, lse, *_ = attend(q, k, v, t, positions, start, LENGTHS, scale=0.5, window=window)
    assert_close(out, context(weights, dense_v))
    assert_close(lse, expected_lse)
    assert not np.any(out[2])
    assert not np.any(out[0, :group])  # an empty segment
    assert np.all(np.isneginf(lse[0, :group]))


@pytest.mark.long(first=1)
@pytest.mark.parametrize("lanes", [4, 2, 1])
def test_a_row_alone_gives_what_it_gives_in_a_batch(lanes):
    """A CPU reads the few tiles of one row without the loop that copies those of a batch."""
    rng = np.random.default_rng(lanes)
    k, v, positions, start, _ = pool(rng, lanes)
    q, t = rng.normal(size=(3, 8, 1, 8)).astype(np.float32), np.array([[720], [310], [50]])
    together = attend(q, k, v, t, positions, start, LENGTHS, scale=0.5)
    for b in range(3):
        row = slice(b, b + 1)
        alone = attend(q[row], k[row], v[row], t[row], positions[row], start[row], LENGTHS[row], scale=0.5)
        assert_close(alone.context, together.context[row])
        assert_close(alone.lse, together.lse[row])


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_entries_give_the_results_of_their_numbers(bits):
    rng = np.random.default_rng(bits)
    k, v, positions, start, _ = pool(rng, 2)
    codes = [quantized(x, bits, 4) for x in (k, v)]
    q, t = rng.normal(size=(3, 8, 1, 8)).astype(np.float32), np.array([[720], [310], [50]])
    got, same = (
        attend(q, *stored, t, positions, start, LENGTHS, scale=0.5) for stored in (codes, [plainly(x) for x in codes])
    )
    assert_close(got.context, same.context, *ROUNDING)
    assert_close(got.lse, same.lse, *ROUNDING)


REDUCTIONS = [
    (4, Reduction("sum", "sum", "group")),
    (5, Reduction("max", "mean", "rows")),
    (3, Reduction("mean", "max")),
    (3, Reduction("sum", "max", "group")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "lanes", "extra"), [(*case, extra) for case, extra in zip(SEGMENT_CASES, REDUCTIONS, strict=True)], ids=str
)
def test_logits_and_extra_query_rows(case, lanes, extra):
    check_segments(attend, replace(case, dtype="float32"), lanes, extra=extra, empty=9.0)


def test_bfloat16_is_as_accurate_as_its_inputs():
    rng = np.random.default_rng(3)
    k, v, positions, start, (dense_k, dense_v, dense_p) = pool(rng, 2, jnp.bfloat16)
    q = rng.normal(size=(3, 8, 1, 8)).astype(jnp.bfloat16)
    t = np.array([[720], [310], [50]])
    out, lse, *_ = attend(q, k, v, t, positions, start, LENGTHS, scale=0.25)
    weights, expected_lse, _ = attention(q, dense_k, t, dense_p, 0.25)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close(out, context(weights, dense_v), 1e-2, 2e-2)
    assert_close(lse, expected_lse)


def test_a_bias_multiplies_weights():
    """A bias of ln 2 on a key counts it twice (equation E5)."""
    k = np.zeros((1, 1, 2 * PAGE, 8), np.float32)
    k[0, 0, 1] = 1
    v = np.arange(2 * PAGE, dtype=np.float32)[None, None, :, None] * np.ones(8, np.float32)
    positions = np.where(np.arange(2 * PAGE) < 2, np.arange(2 * PAGE), -1)[None, None]
    bias = np.zeros((1, 1, 2 * PAGE), np.float32)
    bias[0, 0, 1] = np.log(2)
    q, at, start, used = np.zeros((1, 1, 1, 8), np.float32), np.array([[5]]), np.array([[0]]), np.array([[2]])
    out, lse, *_ = attend(q, k, v, at, positions, start, used, scale=1.0, bias=bias)
    assert_close(out, np.full((1, 1, 1, 8), 2 / 3))
    assert_close(lse, np.log([[[3.0]]]))


def test_empty_segments_give_no_context():
    rng = np.random.default_rng(1)
    k, v, positions, start, _ = pool(rng, 4)
    q = rng.normal(size=(3, 4, 1, 8)).astype(np.float32)
    out, lse, *_ = attend(q, k, v, np.full((3, 1), 9), positions, start, 0 * LENGTHS, scale=1.0)
    assert not np.any(out)
    assert np.all(np.isneginf(lse))

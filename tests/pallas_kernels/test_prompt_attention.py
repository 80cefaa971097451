"""Prompt attention in XLA against float64 softmax attention."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import prompt_attention
from tests.dense import assert_close, attention, compiled, context, entries, left_padded
from tests.pallas_kernels.cases import PROMPT_CASES
from tests.pallas_kernels.checks import check_prompt, jitted

blocked = importlib.import_module("kvjax.pallas_kernels.xla.blocked")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_Q", 8)
    monkeypatch.setattr(blocked, "BLOCK_K", 16)


def problem(rng, group, new, slots, lengths, past, dtype=np.float32):
    rows, heads = len(lengths), 2
    q = rng.normal(size=(rows, group * heads, new, 8)).astype(dtype)
    k, v = rng.normal(size=(2, rows, heads, new, 8)).astype(dtype)
    t = left_padded(lengths, new, past)
    cached_k, cached_v, cached = entries(rng, rows, heads, slots, past, dtype)
    k, v = np.concatenate([cached_k, k], axis=2), np.concatenate([cached_v, v], axis=2)
    p = np.concatenate([cached, np.broadcast_to(t[:, None], (rows, heads, new))], axis=2)
    return q, k, v, t, p


@pytest.mark.parametrize(
    ("group", "new", "slots", "window"),
    [
        *((4, new, slots, None) for new, slots in ((1, 0), (8, 16), (29, 0), (13, 37), (40, 5))),
        *((1, 13, 37, window) for window in (None, 5, 1)),
        *((7, 29, 20, window) for window in (None, 14)),
    ],
)
def test_attends_to_slots_in_any_order_and_causally_to_itself(group, new, slots, window):
    """Rows are full, padded on the left, and without tokens. Some sizes are multiples of the tiles, some are not."""
    rng = np.random.default_rng(group * 100 + new)
    q, k, v, t, p = problem(rng, group, new, slots, [new, (new + 1) // 2, 0], [50, 7, 20])
    out, lse = compiled(prompt_attention, q, k, v, t, p, scale=0.5, window=window)
    weights, expected_lse, _ = attention(q, k, t, p, 0.5, window)
    assert_close(out, context(weights, v))
    assert_close(lse, expected_lse)
    assert not np.any(out[2]), "the context of a row that sees nothing is 0"


def test_a_bias_is_added_to_the_logits_of_its_entry():
    rng = np.random.default_rng(8)
    q, k, v, t, p = problem(rng, 4, 13, 37, [13, 7], [50, 7])
    bias = rng.normal(size=p.shape).astype(np.float32)
    out, lse = compiled(prompt_attention, q, k, v, t, p, scale=0.5, bias=bias)
    weights, expected_lse, _ = attention(q, k, t, p, 0.5, bias=bias)
    assert_close(out, context(weights, v))
    assert_close(lse, expected_lse)


@pytest.mark.parametrize(("case", "slots"), [case for case in PROMPT_CASES if case[0].softcap], ids=str)
def test_a_soft_cap_comes_before_the_bias(case, slots):
    check_prompt(jitted(prompt_attention), case, slots)


def test_bfloat16_is_as_accurate_as_its_inputs():
    rng = np.random.default_rng(0)
    q, k, v, t, p = problem(rng, 4, 21, 19, [21, 9], [30, 12], jnp.bfloat16)
    out, lse = compiled(prompt_attention, *map(jnp.asarray, (q, k, v)), t, p, scale=0.25)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    weights, expected_lse, _ = attention(q, k, t, p, 0.25)
    assert_close(lse, expected_lse, 1e-5, 1e-4)  # the scale is a power of two, so products are exact in float32
    assert_close(out, context(weights, v), 1e-2, 2e-2)


def test_huge_logits_neither_overflow_nor_vanish():
    """Inputs are integers times powers of two, so that logits up to 1e5 are exact in float32."""
    rng = np.random.default_rng(1)
    q, k, v, t, p = problem(rng, 2, 30, 11, [30, 17], [20, 9])
    q, k = (64.0 * np.round(x * 2) for x in (q, k))
    out, lse = compiled(prompt_attention, q.astype(np.float32), k.astype(np.float32), v, t, p, scale=0.5)
    weights, expected_lse, _ = attention(q, k, t, p, 0.5)
    assert np.abs(expected_lse[np.isfinite(expected_lse)]).max() > 1e4
    assert_close(out, context(weights, v))
    assert_close(lse, expected_lse)


def test_tile_sizes_do_not_matter(monkeypatch):
    """The default tile sizes against small ones, on a problem of more than one default tile."""
    rng = np.random.default_rng(2)
    q, k, v, t, p = problem(rng, 1, 300, 530, [300, 130], [600, 40])
    small = compiled(prompt_attention, q, k, v, t, p, scale=0.5)
    monkeypatch.undo()
    assert (blocked.BLOCK_Q, blocked.BLOCK_K) != (8, 16)
    for mine, other in zip(compiled(prompt_attention, q, k, v, t, p, scale=0.5), small, strict=True):
        assert_close(mine, other)

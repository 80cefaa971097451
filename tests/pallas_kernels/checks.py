"""Checks of an implementation, a kernel or a reference, against float64 attention."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import PAGE, Asked, QuantizedArray, Reduction, plain
from tests.dense import assert_close, attention, context, entries, left_padded
from tests.pallas_kernels.cases import Case

FOLDS = {"sum": np.sum, "mean": np.mean, "max": np.max}
LENGTHS = np.array([[0, 5, 300, 16], [130, 0, 0, 1], [40, 41, 42, 43]])  # entries per segment: 3 batch rows, 4 kv heads


def on_gpu() -> bool:
    """Whether kernels for GPUs can run compiled here."""
    return jax.default_backend() == "gpu"


def reference_of(operation: str) -> Callable[..., Any]:
    """The reference of an operation, which dispatch would hide behind a kernel."""
    return getattr(importlib.import_module(f"kvjax.pallas_kernels.{operation}.reference"), operation)


def jitted(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function under a jit of its own. Arguments by keyword are static, except for arrays."""

    def call(*arrays: Any, bias: Any = None, lse: Any = None, asked: Any = None, **static: Any) -> Any:
        extra = {name: x for name, x in (("bias", bias), ("lse", lse), ("asked", asked)) if x is not None}
        results = jax.jit(partial(function, **static, **options))(*arrays, **extra)
        return jax.tree.map(np.asarray, results)  # NumPy looks at them without programs of its own

    return call


plainly = jax.jit(plain)


def received(weights, heads, kind):
    """The attention that each slot received: weights [B, Hq, W, S], folded over the group, summed over the W rows."""
    rows, _, queries, slots = weights.shape
    return FOLDS[kind](weights.reshape(rows, heads, -1, queries, slots), axis=2).sum(axis=2)


def reduced(weights, visible, reduction):
    """Reduces weights [B, Hq, W, M] to [B, H, M], given visible [B, H, W, M], as `Reduction` defines it."""
    rows, heads, queries, keys = visible.shape
    viewers = np.maximum(visible.sum(axis=2), 1)[:, :, None]
    w = weights.reshape(rows, heads, -1, queries, keys)

    def over_rows(x):
        return (
            x.max(axis=3) if reduction.rows == "max" else x.sum(axis=3) / (viewers if reduction.rows == "mean" else 1)
        )

    if reduction.first == "rows":
        return FOLDS[reduction.group](over_rows(w), axis=2)
    return over_rows(FOLDS[reduction.group](w, axis=2)[:, :, None])[:, :, 0]


def numbers(x: Any, rounded: bool) -> np.ndarray:
    """The numbers of stored keys or values.

    Args:
        rounded: whether code * scale is rounded to the dtype of x. Otherwise it is exact, in float32.
    """
    if not isinstance(x, QuantizedArray):
        return np.asarray(x)
    return np.asarray(plainly(x if rounded else replace(x, dtype=jnp.dtype("float32"))))


def check_slots(kernel: Callable[..., Any], case: Case, rounded: bool = True) -> None:
    """Checks an implementation of slot_attention.

    Args:
        rounded: see `numbers`.
    """
    q, k, v, t, p, bias = case.arrays
    options = {"scale": case.scale, "window": case.window, "softcap": case.softcap, "received": case.received}
    keys, values = case.stored(k), case.stored(v)
    out, lse, got, none = kernel(q, keys, values, t, p, bias=bias, **options)
    k, v = (numbers(x, rounded) for x in (keys, values))
    assert (out.dtype, lse.dtype, none) == (q.dtype, jnp.float32, None)
    weights, expected_lse, _ = attention(q, k, t, p, case.scale, case.window, softcap=case.softcap, bias=bias)
    assert_close(out, context(weights, v), *case.typical(out))
    assert_close(lse, expected_lse, *case.typical(lse))
    if case.received is None:
        assert got is None
        return
    assert got.dtype == jnp.float32
    assert_close(got, received(weights, 2, case.received), *case.typical(got))


def check_extra(kernel: Callable[..., Any], case: Case, count: int, reduction: Reduction) -> None:
    """Checks an implementation of slot_attention with `count` extra query rows.

    Row 0 has extra rows that see a part of the slots. Row 1 has some extra rows of padding. In row 2 no query attends,
    but all extra rows count. Row 3 repeats row 0 with extra rows of padding only.
    """
    q, k, v, t, p, bias = (None if x is None else np.concatenate([x, x[:1]]) for x in case.arrays)
    rng = np.random.default_rng(count)
    queries = rng.normal(size=(4, q.shape[1], count, case.head_dim)).astype(q.dtype)
    at = np.stack([rng.permutation(np.arange(count) + place) for place in (case.slots, 4, 2 * case.slots, 0)])
    at[1, : count // 2] = -1
    at[3] = -1
    lse = rng.normal(size=queries.shape[:3]).astype(np.float32) + 5
    lse[0, 0, 0] = -np.inf  # this query saw nothing
    asked = Asked(queries, lse, at.astype(np.int32), reduction)
    options = {"scale": case.scale, "window": case.window, "softcap": case.softcap, "received": case.received}
    keys, values = case.stored(k), case.stored(v)
    out, sums, got, scores = kernel(q, keys, values, t, p, bias=bias, asked=asked, **options)
    k, v = (numbers(x, rounded=True) for x in (keys, values))
    weights, expected_lse, _ = attention(q, k, t, p, case.scale, case.window, softcap=case.softcap, bias=bias)
    assert_close(out, context(weights, v), *case.typical(out))
    assert_close(sums, expected_lse, *case.typical(sums))
    if case.received is not None:
        assert_close(got, received(weights, 2, case.received), *case.typical(got))
    assert (scores.shape, scores.dtype) == (p.shape, jnp.float32)
    lse = np.where(np.isneginf(lse), np.inf, lse)
    weights, _, seen = attention(queries, k, at, p, case.scale, case.window, softcap=case.softcap, lse=lse, bias=bias)
    assert_close(scores, reduced(weights, seen, reduction), *case.typical(scores))
    assert not np.any(scores[3])
    assert np.any(scores[2]) == (case.bias != "none")


def check_window(kernel: Callable[..., Any], case: Case) -> None:
    """Checks an implementation of window_scores. A given log-sum-exp covers more keys than are scored."""
    q, k, _, t, p, bias = case.arrays
    weights, lse, visible = attention(q, k, t, p, case.scale, case.window, softcap=case.softcap, bias=bias)
    scored = np.where(p % 5 == 0, -1, p) if case.lse else p
    seen = (scored >= 0)[:, :, None]
    expected = reduced(np.where(seen.repeat(case.group, 1), weights, 0), visible & seen, case.reduction)
    options = {
        "scale": case.scale,
        "window": case.window,
        "softcap": case.softcap,
        "causal": case.causal,
        "reduction": case.reduction,
    }
    options |= {"lse": lse.astype(np.float32) if case.lse else None, "bias": bias}
    got = kernel(q, k, t, scored.astype(np.int32), **options)
    assert got.dtype == jnp.float32
    assert_close(got, expected, *case.typical(got))
    assert not np.any(got[2]), "a row without queries scores 0"


def check_prompt(kernel: Callable[..., Any], case: Case, slots: int) -> None:
    """Checks an implementation of prompt_attention. Batch rows are full, padded on the left, and without tokens.

    Args:
        slots: cached slots before the new tokens.
    """
    rng = np.random.default_rng(case.queries)
    new, dtype, past = case.queries, jnp.dtype(case.dtype), [2 * slots, slots // 2, slots]
    t = left_padded([new, (new + 1) // 2, 0], new, past).astype(np.int32)
    q = rng.normal(size=(3, 2 * case.group, new, case.head_dim)).astype(dtype)
    k, v = rng.normal(size=(2, 3, 2, new, case.head_dim)).astype(dtype)
    cached_k, cached_v, cached = entries(rng, 3, 2, slots, past, dtype, case.head_dim)
    k, v = np.concatenate([cached_k, k], axis=2), np.concatenate([cached_v, v], axis=2)
    p = np.concatenate([cached, np.broadcast_to(t[:, None], (3, 2, new))], axis=2).astype(np.int32)
    bias = None if case.bias is None else rng.normal(size=p.shape).astype(np.float32)
    options = {} if bias is None else {"bias": bias}
    out, lse = kernel(q, k, v, t, p, scale=case.scale, window=case.window, softcap=case.softcap, **options)
    weights, expected_lse, _ = attention(q, k, t, p, case.scale, case.window, softcap=case.softcap, bias=bias)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    assert_close(out, context(weights, v), *case.typical(out))
    assert_close(lse, expected_lse, *case.typical(lse))


def check_segments(
    kernel: Callable[..., Any],
    case: Case,
    lanes: int,
    rounded: bool = True,
    extra: tuple[int, Reduction] | None = None,
    empty: float = np.nan,
) -> None:
    """Checks an implementation of segment_attention.

    Args:
        lanes: P.
        rounded: see `numbers`.
        extra: the number of extra query rows and the reduction of their weights, to check scores and logits as well.
        empty: what empty rows of the pool hold.
    """
    rng = np.random.default_rng(lanes)
    B, H = LENGTHS.shape
    S, J, D, dtype = LENGTHS.max(), H // lanes, case.head_dim, jnp.dtype(case.dtype)
    sizes = -(-LENGTHS // PAGE) * PAGE + PAGE * (np.arange(H) % 2)  # some segments have empty rows
    T = sizes.reshape(B, lanes, J).sum(-1).max()
    pools = [np.full((B, lanes, T, D), empty, dtype) for _ in range(2)]
    pools += [rng.integers(0, 50, (B, lanes, T)).astype(np.int32), np.full((B, lanes, T), empty, np.float32)]
    dense = [np.zeros((B, H, S, D), dtype), np.zeros((B, H, S, D), dtype), np.full((B, H, S), -1), np.zeros((B, H, S))]
    start = np.zeros((B, H), np.int32)
    for b, h in np.ndindex(B, H):
        start[b, h], n = sizes[b, h // J * J : h].sum(), LENGTHS[b, h]
        positions = np.where(rng.random(n) < 0.1, -1, rng.permutation(n))
        drawn = (*rng.normal(size=(2, n, D)).astype(dtype), positions, rng.normal(size=n).astype(np.float32))
        for pool, of_head, x in zip(pools, dense, drawn, strict=True):
            pool[b, h // J, start[b, h] : start[b, h] + n] = x
            of_head[b, h, :n] = x
    k, v, p, bias = (*pools[:3], None if case.bias is None else pools[3])
    dense_bias = None if bias is None else dense[3]
    t = np.stack([np.full(case.queries, 320), 100 + np.arange(case.queries), np.full(case.queries, -1)])
    q = rng.normal(size=(B, H * case.group, case.queries, D)).astype(dtype)
    given = (q, case.stored(k), case.stored(v), t.astype(np.int32), p, start, LENGTHS.astype(np.int32))
    dense[:2] = (numbers(case.stored(x), rounded) for x in dense[:2])
    options: dict[str, Any] = {"logits": extra is not None}
    if extra is not None:
        count, reduction = extra
        at = np.stack([np.arange(count) + place for place in (250, 30, 30)]).astype(np.int32)
        at[1, : count // 2] = -1
        queries = rng.normal(size=(B, H * case.group, count, D)).astype(dtype)
        sums = rng.normal(size=queries.shape[:3]).astype(np.float32) + 5
        options["asked"] = Asked(queries, sums, at, reduction)
    out, lse, logits, scores = kernel(
        *given, scale=case.scale, window=case.window, softcap=case.softcap, bias=bias, **options
    )
    weights, expected_lse, _ = attention(
        q, dense[0], t, dense[2], case.scale, case.window, softcap=case.softcap, bias=dense_bias
    )
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    assert_close(out, context(weights, dense[1]), *case.typical(out))
    assert_close(lse, expected_lse, *case.typical(lse))
    if extra is None:
        assert logits is None
        assert scores is None
        return
    received, _, _ = attention(
        queries, dense[0], at, dense[2], case.scale, case.window, softcap=case.softcap, lse=sums, bias=dense_bias
    )
    asked_seen = attention(queries, dense[0], at, dense[2], case.scale, case.window, softcap=case.softcap)[2]
    expected_scores = reduced(received, asked_seen, reduction)
    assert (logits.dtype, scores.dtype) == (jnp.float32, jnp.float32)
    assert (logits.shape, scores.shape) == ((B, lanes, case.group * case.queries, T), (B, lanes, T))
    for b, h in np.ndindex(B, H):
        n, lane, rows = LENGTHS[b, h], h // J, slice(start[b, h], start[b, h] + LENGTHS[b, h])
        assert_close(scores[b, lane, rows], expected_scores[b, h, :n], *case.typical(scores))
        if n and np.any(t[b] >= 0):
            own = slice(h * case.group, (h + 1) * case.group)
            finite = np.where(np.isneginf(lse[b, own]), 0, lse[b, own])[..., None]
            got = np.exp(logits[b, lane, :, rows].reshape(case.group, -1, n) - finite)
            assert_close(got, weights[b, own, :, :n], *case.typical(logits))


def of_platform(platform: str) -> Callable[..., Any]:
    """What `jax.lax.platform_dependent` does on a platform, or in its default form for another name."""

    def run(*arrays: Any, default: Callable[..., Any] | None = None, **forms: Callable[..., Any]) -> Any:
        form = forms.get(platform, default)
        assert form is not None
        return form(*arrays)

    return run

"""Problems for the kernels of every backend, each with what is expected, in float64 and by the reference in float32."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import PAGE, Asked, QuantizedArray, Reduction, plain
from tests.dense import assert_close, attention, context, entries, left_padded

TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (1e-2, 2e-2), "float16": (1e-3, 2e-3)}  # of what is of such a dtype
DEFAULT = Reduction()
FOLDS = {"sum": np.sum, "mean": np.mean, "max": np.max}


def reference_of(operation: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"kvjax.pallas_kernels.{operation}.reference"), operation)


def received(weights, heads, how):
    """What each slot received: weights [B, Hq, W, S] folded over the group, then summed over the W rows."""
    rows, _, queries, slots = weights.shape
    return FOLDS[how](weights.reshape(rows, heads, -1, queries, slots), axis=2).sum(axis=2)


def reduced(weights, visible, reduction):
    """weights [B, Hq, W, M] and visible [B, H, W, M] as the reduction's docstring says."""
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


@dataclass(frozen=True)
class Case:
    """Queries and slots: of three rows one has a head without entries, one a single entry, one no query."""

    head_dim: int
    group: int
    queries: int
    slots: int
    dtype: str = "float32"
    window: int | None = None
    bias: str | None = None  # "some": normal; "none": -inf everywhere
    received: str | None = None
    huge: bool = False
    lse: bool = True  # given, for scores
    causal: bool = True
    reduction: Reduction = DEFAULT
    bits: int | None = None  # of keys and values that are quantised
    per_scale: int = 32  # channels

    def __str__(self) -> str:
        extras = [
            name
            for name, there in (
                ("window", self.window is not None),
                (f"bias_{self.bias}", self.bias is not None),
                (f"received_{self.received}", self.received is not None),
                ("huge", self.huge),
                ("all", not self.causal),
                ("own_lse", not self.lse),
                (f"{self.bits}_bits_by_{self.per_scale}", self.bits is not None),
                (f"{self.reduction.rows}_{self.reduction.group}_{self.reduction.first}", self.reduction != DEFAULT),
            )
            if there
        ]
        return "-".join(
            [f"D{self.head_dim}", f"G{self.group}", f"W{self.queries}", f"S{self.slots}", self.dtype, *extras]
        )

    @property
    def arrays(self):
        """(q, k, v, q_positions, k_positions, bias or None), in NumPy."""
        rng = np.random.default_rng(self.head_dim + self.slots + self.queries)
        heads, dtype = 2, jnp.dtype(self.dtype)
        q = rng.normal(size=(3, heads * self.group, self.queries, self.head_dim))
        k, v = rng.normal(size=(2, 3, heads, self.slots, self.head_dim))
        if self.huge:
            q, k = 64 * np.round(2 * q), 64 * np.round(2 * k)
        past = 2 * self.slots
        positions = np.full((3, heads, self.slots), -1, np.int32)
        for head in range(heads):
            positions[0, head] = rng.permutation(past)[: self.slots]
            positions[0, head, rng.permutation(self.slots)[: self.slots // 3]] = -1
            positions[2, head] = rng.permutation(past)[: self.slots]
        positions[0, :, self.slots - self.slots // 4 :] = -1  # the bound lies before the last slot
        positions[0, 1] = -1
        positions[1, :, self.slots // 2] = 3
        t = past - self.queries + np.arange(self.queries) if self.causal else np.full(self.queries, past)
        t = np.stack([t, t, np.full(self.queries, -1)]).astype(np.int32)
        if self.causal and self.queries > 4:
            t[1, : self.queries // 2] = -1  # padding, on the left
            t[0] = np.roll(t[0] - past // 2, 3)  # some see a part; in the order of a ring
        bias = None
        if self.bias is not None:
            bias = np.full(positions.shape, -np.inf, np.float32)
            if self.bias == "some":
                bias = rng.normal(size=positions.shape).astype(np.float32)
        return q.astype(dtype), k.astype(dtype), v.astype(dtype), t, positions, bias

    def held(self, x: Any) -> Any:
        """Keys or values as the kernel is given them."""
        x = jnp.asarray(x)
        return x if self.bits is None else QuantizedArray.of(x, self.bits, self.per_scale)

    @property
    def scale(self) -> float:
        return 1.5 * self.head_dim**-0.5

    def typical(self, values: Any) -> tuple[float, float]:
        """Tolerances for an array of its own dtype."""
        if self.huge:
            return 1e-3, 2e-3  # a log-sum-exp of some 1e4 is itself rounded to 1e-3 in float32
        return TOLERANCE[jnp.dtype(values.dtype).name]


SLOT_CASES = [
    Case(64, 1, 1, 50),
    Case(64, 4, 1, 130, received="sum"),
    Case(96, 5, 1, 70, received="mean", bias="some"),
    Case(128, 8, 8, 300, "bfloat16"),
    Case(128, 4, 1, 300, "bfloat16", received="max"),
    Case(256, 7, 1, 40, "float16", window=30),
    Case(128, 4, 32, 64, window=25, received="sum"),
    Case(64, 2, 64, 90, received="mean"),
    Case(64, 1, 200, 33),
    Case(64, 4, 3, 64, bias="none"),
    Case(64, 4, 1, 40, huge=True, received="max"),
    Case(8, 2, 1, 5),
    Case(80, 3, 2, 129, bias="some", window=40),
]

QUANTIZED_CASES = [
    Case(128, 4, 1, 300, "bfloat16", bits=8),
    Case(64, 1, 1, 50, bits=8, per_scale=64, received="sum"),
    Case(64, 4, 3, 140, bits=8, per_scale=16, bias="some", received="max"),
    Case(128, 7, 1, 130, bits=4, bias="some", window=100),
    Case(64, 4, 3, 70, bits=4, per_scale=64, received="max"),
    Case(256, 1, 1, 140, "bfloat16", bits=4, received="mean"),
    Case(32, 2, 40, 90, bits=4, per_scale=32, received="mean"),
    Case(128, 2, 1, 40, "float16", bits=8, per_scale=128, bias="none"),
]

# (case of what attends, queries that are asked besides, how what they give is reduced)
ASKED_CASES = [
    (Case(64, 4, 1, 130), 4, Reduction("sum", "sum", "group")),
    (Case(64, 1, 1, 50, window=70), 1, Reduction("max", "sum", "group")),
    (Case(128, 7, 1, 200, "bfloat16"), 25, Reduction("sum", "sum", "group")),
    (Case(96, 4, 1, 90, bias="some", window=100), 25, Reduction("max", "sum", "group")),
    (Case(64, 7, 1, 70, received="sum"), 4, Reduction("max", "max", "group")),
    (Case(64, 4, 1, 64, received="max", bias="none"), 1, Reduction("sum", "max", "group")),
    (Case(80, 3, 2, 129, bias="some"), 5, Reduction("max", "mean", "rows")),
    (Case(64, 4, 1, 60), 5, Reduction("mean", "mean")),
    (Case(128, 4, 33, 64), 4, Reduction("sum", "mean")),
    (Case(64, 4, 1, 90), 150, Reduction("sum", "sum", "group")),
]

QUANTIZED_ASKED_CASES = [
    (Case(128, 4, 1, 130, bits=8), 4, Reduction("sum", "sum", "group")),
    (Case(64, 7, 1, 90, bits=4, window=100), 25, Reduction("max", "sum", "group")),
]

WINDOW_CASES = [
    Case(64, 1, 1, 50),
    Case(128, 4, 32, 200, "bfloat16"),
    Case(96, 5, 8, 70, lse=False, bias="some"),
    Case(256, 7, 1, 40, "float16", window=30),
    Case(64, 8, 64, 90, causal=False),
    Case(64, 2, 200, 130, reduction=Reduction("mean", "mean")),
    Case(64, 4, 90, 90, window=40, lse=False, reduction=Reduction("max", "max")),
    Case(64, 4, 32, 64, huge=True),
    Case(64, 4, 3, 64, bias="none", lse=False),
    Case(8, 2, 1, 5),
    *(
        Case(64, 3, 20, 40, reduction=Reduction(rows, group, first), window=window)
        for rows, group, first, window in (
            ("sum", "max", "rows", None),
            ("sum", "max", "group", 30),
            ("max", "mean", "rows", None),
            ("max", "sum", "group", None),
            ("mean", "max", "rows", None),
            ("mean", "max", "group", 30),
        )
    ),
]

SEGMENT_CASES = [
    (Case(64, 1, 1, 0), 4),
    (Case(96, 5, 1, 0, bias="some"), 2),
    (Case(128, 4, 3, 0, "bfloat16", window=60), 1),
]

QUANTIZED_SEGMENT_CASES = [
    (Case(128, 1, 1, 0, "bfloat16", bits=8), 4),
    (Case(128, 7, 1, 0, bias="some", bits=8, per_scale=128), 2),
    (Case(128, 4, 3, 0, window=60, bits=4), 1),
]


def numbers(x: Any, rounded: bool) -> np.ndarray:
    """What keys or values stand for; in float32 a code times its scale, if that is not `rounded` to their dtype."""
    return np.asarray(plain(x if rounded or not isinstance(x, QuantizedArray) else replace(x, dtype=jnp.float32)))


def check_slots(kernel: Callable[..., Any], case: Case, rounded: bool = True) -> None:
    """`kernel` in place of slot_attention; `rounded`: as `numbers` takes it."""
    q, k, v, t, p, bias = case.arrays
    options = {"scale": case.scale, "window": case.window, "received": case.received}
    keys, values = case.held(k), case.held(v)
    given = [None if x is None else jnp.asarray(x) for x in (q, t, p, bias)]
    out, lse, got, none = kernel(given[0], keys, values, *given[1:3], bias=given[3], **options)
    k, v = (numbers(x, rounded) for x in (keys, values))
    assert (out.dtype, lse.dtype, none) == (q.dtype, jnp.float32, None)
    weights, expected_lse, _ = attention(q, k, t, p, case.scale, case.window, bias=bias)
    assert_close(out, context(weights, v), *case.typical(out))
    assert_close(lse, expected_lse, *case.typical(lse))
    full = [x.astype(np.float32) for x in (q, k, v)]
    expected = reference_of("slot_attention")(*full, t, p, bias=bias, **options)
    assert_close(out, expected[0], *case.typical(out))
    assert_close(lse, expected[1], *case.typical(lse))
    if case.received is None:
        assert got is None
        return
    assert got.dtype == jnp.float32
    assert_close(got, received(weights, 2, case.received), *case.typical(got))
    assert_close(got, expected[2], *case.typical(got))


def check_asked(kernel: Callable[..., Any], case: Case, count: int, reduction: Reduction) -> None:
    """`kernel` in place of slot_attention, with queries that are asked besides.

    Some see a part of the slots only, in the second row some are none, in the third no query attends but all are asked,
    and in the fourth, otherwise the first again, none is asked.
    """
    q, k, v, t, p, bias = (None if x is None else np.concatenate([x, x[:1]]) for x in case.arrays)
    rng = np.random.default_rng(count)
    asking = rng.normal(size=(4, q.shape[1], count, case.head_dim)).astype(q.dtype)
    at = np.stack([rng.permutation(np.arange(count) + place) for place in (case.slots, 4, 2 * case.slots, 0)])
    at[1, : count // 2] = -1
    at[3] = -1
    lse = rng.normal(size=asking.shape[:3]).astype(np.float32) + 5
    lse[0, 0, 0] = -np.inf  # it saw nothing
    asked = Asked(*map(jnp.asarray, (asking, lse, at.astype(np.int32))), reduction)
    options = {"scale": case.scale, "window": case.window, "received": case.received}
    keys, values = case.held(k), case.held(v)
    given = [None if x is None else jnp.asarray(x) for x in (q, t, p, bias)]
    out, sums, got, scores = kernel(given[0], keys, values, *given[1:3], bias=given[3], asked=asked, **options)
    k, v = (np.asarray(plain(x)) for x in (keys, values))
    weights, expected_lse, _ = attention(q, k, t, p, case.scale, case.window, bias=bias)
    assert_close(out, context(weights, v), *case.typical(out))
    assert_close(sums, expected_lse, *case.typical(sums))
    if case.received is not None:
        assert_close(got, received(weights, 2, case.received), *case.typical(got))
    assert (scores.shape, scores.dtype) == (p.shape, jnp.float32)
    lse = np.where(np.isneginf(lse), np.inf, lse)
    weights, _, seen = attention(asking, k, at, p, case.scale, case.window, lse=lse, bias=bias)
    assert_close(scores, reduced(weights, seen, reduction), *case.typical(scores))
    wide = (x.astype(np.float32) for x in (q, k, v))
    asked = replace(asked, queries=asked.queries.astype(jnp.float32))
    reference = reference_of("slot_attention")(*wide, t, p, bias=bias, asked=asked, **options)
    assert_close(scores, reference.scores, *case.typical(scores))
    assert not np.any(scores[3])
    assert np.any(scores[2]) == (case.bias != "none")


def check_window(kernel: Callable[..., Any], case: Case) -> None:
    """`kernel` in place of window_scores. A log-sum-exp that is given is one over more keys than are scored."""
    q, k, _, t, p, bias = case.arrays
    weights, lse, visible = attention(q, k, t, p, case.scale, case.window, bias=bias)
    scored = np.where(p % 5 == 0, -1, p) if case.lse else p
    seen = (scored >= 0)[:, :, None]
    expected = reduced(np.where(seen.repeat(case.group, 1), weights, 0), visible & seen, case.reduction)
    options = {"scale": case.scale, "window": case.window, "causal": case.causal, "reduction": case.reduction}
    options |= {"lse": lse.astype(np.float32) if case.lse else None, "bias": bias}
    got = kernel(*map(jnp.asarray, (q, k, t, scored)), **options)
    assert got.dtype == jnp.float32
    assert_close(got, expected, *case.typical(got))
    by_reference = reference_of("window_scores")(*(x.astype(np.float32) for x in (q, k)), t, scored, **options)
    assert_close(got, by_reference, *case.typical(got))
    assert not np.any(got[2]), "no query, no score"


# (case of N new tokens, cached slots)
PROMPT_CASES = [
    (Case(64, 4, 40, 0), 0),
    (Case(96, 5, 21, 0, window=9), 50),
    (Case(128, 2, 150, 0, "bfloat16"), 70),
    (Case(64, 1, 13, 0, bias="some"), 37),
]


def check_prompt(kernel: Callable[..., Any], case: Case, slots: int) -> None:
    """`kernel` in place of prompt_attention: rows that are full, padded on the left, and without a token."""
    rng = np.random.default_rng(case.queries)
    new, dtype, past = case.queries, jnp.dtype(case.dtype), [2 * slots, slots // 2, slots]
    t = left_padded([new, (new + 1) // 2, 0], new, past)
    q = rng.normal(size=(3, 2 * case.group, new, case.head_dim)).astype(dtype)
    k, v = rng.normal(size=(2, 3, 2, new, case.head_dim)).astype(dtype)
    cached_k, cached_v, cached = entries(rng, 3, 2, slots, past, dtype, case.head_dim)
    k, v = np.concatenate([cached_k, k], axis=2), np.concatenate([cached_v, v], axis=2)
    p = np.concatenate([cached, np.broadcast_to(t[:, None], (3, 2, new))], axis=2).astype(np.int32)
    bias = None if case.bias is None else jnp.asarray(rng.normal(size=p.shape), jnp.float32)
    out, lse = kernel(*map(jnp.asarray, (q, k, v, t, p)), scale=case.scale, window=case.window, bias=bias)
    weights, expected_lse, _ = attention(q, k, t, p, case.scale, case.window, bias=bias)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    assert_close(out, context(weights, v), *case.typical(out))
    assert_close(lse, expected_lse, *case.typical(lse))


LENGTHS = np.array([[0, 5, 300, 16], [130, 0, 0, 1], [40, 41, 42, 43]])  # of 4 heads in 3 rows


def check_segments(kernel: Callable[..., Any], case: Case, lanes: int, rounded: bool = True) -> None:
    """`kernel` in place of segment_attention, on a pool with NaN where nothing is held."""
    rng = np.random.default_rng(lanes)
    B, H = LENGTHS.shape
    S, J, D, dtype = LENGTHS.max(), H // lanes, case.head_dim, jnp.dtype(case.dtype)
    sizes = -(-LENGTHS // PAGE) * PAGE + PAGE * (np.arange(H) % 2)  # some have room left
    T = sizes.reshape(B, lanes, J).sum(-1).max()
    pools = [np.full((B, lanes, T, D), np.nan, dtype) for _ in range(2)]
    pools += [rng.integers(0, 50, (B, lanes, T)).astype(np.int32), np.full((B, lanes, T), np.nan, np.float32)]
    dense = [np.zeros((B, H, S, D), dtype), np.zeros((B, H, S, D), dtype), np.full((B, H, S), -1), np.zeros((B, H, S))]
    start = np.zeros((B, H), np.int32)
    for b, h in np.ndindex(B, H):
        start[b, h], n = sizes[b, h // J * J : h].sum(), LENGTHS[b, h]
        positions = np.where(rng.random(n) < 0.1, -1, rng.permutation(n))
        held = (*rng.normal(size=(2, n, D)).astype(dtype), positions, rng.normal(size=n).astype(np.float32))
        for pool, whole, x in zip(pools, dense, held, strict=True):
            pool[b, h // J, start[b, h] : start[b, h] + n] = x
            whole[b, h, :n] = x
    k, v, p, bias = (*pools[:3], None if case.bias is None else pools[3])
    dense_bias = None if bias is None else dense[3]
    t = np.stack([np.full(case.queries, 320), 100 + np.arange(case.queries), np.full(case.queries, -1)])
    q = rng.normal(size=(B, H * case.group, case.queries, D)).astype(dtype)
    given = (jnp.asarray(q), case.held(k), case.held(v), *map(jnp.asarray, (t, p, start, LENGTHS)))
    dense[:2] = (numbers(case.held(x), rounded) for x in dense[:2])
    out, lse = kernel(*given, scale=case.scale, window=case.window, bias=None if bias is None else jnp.asarray(bias))
    weights, expected_lse, _ = attention(q, dense[0], t, dense[2], case.scale, case.window, bias=dense_bias)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    assert_close(out, context(weights, dense[1]), *case.typical(out))
    assert_close(lse, expected_lse, *case.typical(lse))

"""The entries that allocated budgets give the heads of one row, in slow Python."""

from __future__ import annotations

import math

import numpy as np

from kvjax.parts import (
    AdaptiveShares,
    CompositeShares,
    DynamicShares,
    GatedShares,
    GlobalShares,
    HeadShares,
    ImportanceShares,
    LazyLayers,
    RecoveringHeads,
    ThresholdShares,
    UniformShares,
    VarianceShares,
)
from kvjax.policy import AllocatedBudget
from tests.methods.literal_budgets import adaptive, algorithm_1

SINKS, RECENT = 2, 4  # protected in all tests of compositions


def allocated(budget: AllocatedBudget, scores: np.ndarray, mean: int, least: int) -> np.ndarray:
    """The number of entries [L, H] that each head retains of a row.

    Args:
        scores: [L, H, N] of the row's N tokens, in order of position.
        mean: entries of the mean head.
        least: no head retains fewer, as far as it has them.
    """
    L, H, N = scores.shape
    raised = scores.copy()
    raised[..., :SINKS] = raised[..., max(0, N - RECENT) :] = np.inf
    if isinstance(budget, UniformShares):
        counts = np.full((L, H), mean)
    elif isinstance(budget, GatedShares):
        counts = np.where(budget.full, N, mean)
    elif isinstance(budget, LazyLayers):
        counts = np.repeat(lazy(budget, scores, mean, least)[:, None], H, axis=1)
    elif isinstance(budget, ImportanceShares):
        counts = by_importance(budget, N, mean, least)
    elif isinstance(budget, HeadShares):
        counts = in_proportion(budget, N, mean, least)
    elif isinstance(budget, RecoveringHeads):
        counts = recovering(budget, scores, mean, least)
    elif isinstance(budget, ThresholdShares):
        counts = above(raised.reshape(L, budget.groups, H // budget.groups, N), budget.threshold, mean, least)
        counts = counts.reshape(L, H)
    elif isinstance(budget, GlobalShares):
        counts = competing(raised.reshape(L, budget.groups, H // budget.groups, N), mean, least).reshape(L, H)
    elif isinstance(budget, CompositeShares):
        ranked = np.flip(np.sort(raised, axis=-1), axis=-1).mean(axis=1, dtype=np.float32)
        counts = np.repeat(competing(ranked[:, None, None], mean, least).reshape(L, 1), H, axis=1)
    elif isinstance(budget, AdaptiveShares):
        options = {"alpha": budget.alpha, "normalise": budget.normalise, "formula": budget.formula}
        counts = np.array([adaptive(own, mean, least, **options) for own in raised])
    elif isinstance(budget, VarianceShares):
        counts = np.repeat(by_variance(scores.astype(np.float64), mean, least)[:, None], H, axis=1)
    else:
        assert isinstance(budget, DynamicShares)
        counts = np.repeat(dynamic(budget, raised, mean, least)[:, None], H, axis=1)
    return np.minimum(counts, N)


def competing(scores: np.ndarray, mean: int, least: int) -> np.ndarray:
    """The counts [L, groups, heads] of the best scores [L, groups, heads, N]: each group has its own total."""
    L, groups, heads, _ = scores.shape
    counts = np.zeros(scores.shape[:3], int)
    for g in range(groups):
        entries = []
        for layer, head in np.ndindex(L, heads):
            best = sorted(scores[layer, g, head], reverse=True)
            entries += [(np.inf if i < least else x, layer, head) for i, x in enumerate(best)]
        top = sorted(entries, key=lambda entry: (-entry[0], *entry[1:]))[: L * mean * heads]
        for _, layer, head in top:
            counts[layer, g, head] += 1
    return counts


def above(scores: np.ndarray, threshold: float, mean: int, least: int) -> np.ndarray:
    """DMS: the counts [L, groups, heads] of the scores that reach the threshold, or of the best of them."""
    enough = np.where(scores >= threshold, scores, np.nan)
    order = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1, kind="stable")
    enough = np.where((order < least) & np.isnan(enough), np.inf, enough)
    totals = scores.shape[0] * scores.shape[2] * mean
    counts = np.zeros(scores.shape[:3], int)
    for g in range(scores.shape[1]):
        entries = [
            (np.inf if order[layer, g, head, i] < least else x, layer, head)
            for (layer, head, i), x in np.ndenumerate(enough[:, g])
            if not np.isnan(x)
        ]
        for _, layer, head in sorted(entries, key=lambda entry: (-entry[0], *entry[1:]))[:totals]:
            counts[layer, g, head] += 1
    return counts


def by_importance(budget: ImportanceShares, N: int, mean: int, least: int) -> np.ndarray:
    """HeadKV: the counts [L, H] of a prompt of N tokens."""
    importance = np.array(budget.importance)
    if mean >= N:
        return np.full(importance.shape, N)
    protected = min(N, SINKS + RECENT)
    pool = min(int((mean - protected) / budget.beta), mean - max(least, protected))
    counts = np.zeros(importance.shape, int)
    for heads in np.split(np.arange(importance.shape[1]), budget.groups):
        own = importance[:, heads]
        wanted = own / own.sum() * pool * own.size
        given = np.floor(wanted + 1e-9).astype(int)
        order = np.argsort((given - wanted).ravel(), kind="stable")
        given.flat[order[: pool * own.size - given.sum()]] += 1
        counts[:, heads] = mean - pool + given
    return counts


def in_proportion(budget: HeadShares, N: int, mean: int, least: int) -> np.ndarray:
    """LU-KV: the counts [L, H] of a prompt of N tokens."""
    shares = np.array(budget.shares)
    if mean >= N:
        return np.full(shares.shape, N)
    floor = min(N, max(least, SINKS + RECENT))
    counts = np.zeros(shares.shape, int)
    for heads in np.split(np.arange(shares.shape[1]), budget.groups):
        own = shares[:, heads].ravel()
        total = own.size * mean
        wanted = own / own.sum() * total
        given = np.floor(wanted + 1e-6).astype(int)
        given[np.argsort(given - wanted, kind="stable")[: total - given.sum()]] += 1
        given = np.clip(given, floor, N)
        over, beyond = max(0, int(given.sum()) - total), np.cumsum(given - floor).tolist()
        ends = [over * x // max(1, beyond[-1]) for x in beyond]
        counts[:, heads] = (given - np.diff([0, *ends])).reshape(len(shares), -1)
    return counts


def recovering(budget: RecoveringHeads, scores: np.ndarray, mean: int, least: int) -> np.ndarray:
    """FastGen: the counts [L, H], with the largest recovery that fits of those that any set of entries has."""
    L, H, N = scores.shape
    kind = np.floor(scores)
    held = [kind >= lowest for lowest in (3, 2, 1)]
    shares = [np.where(own, 2 * (scores - kind), 0).sum(axis=2, dtype=np.float32) for own in held]
    counts = np.zeros((L, H), int)
    for heads in np.split(np.arange(H), budget.groups):
        tried = {0.0, budget.recovery, *(float(x[layer, h]) for x in shares for layer in range(L) for h in heads)}
        for recovery in sorted((x for x in tried if x <= budget.recovery), reverse=True):
            for layer in range(L):
                for head in heads:
                    enough = [own for own, x in zip(held, shares, strict=True) if x[layer, head] >= recovery]
                    sizes = [own[layer, head].sum() for own in enough]
                    counts[layer, head] = min(max(min(sizes, default=N), least), N)
            if counts[:, heads].sum() <= L * len(heads) * mean:
                break
    return counts


def lazy(budget: LazyLayers, scores: np.ndarray, mean: int, least: int) -> np.ndarray:
    """SimLayerKV: the counts of the layers."""
    L, _, N = scores.shape
    few = min(N, max(budget.lazy, least))
    sums = np.maximum(scores, 0).sum(axis=2).mean(axis=1)
    counts = np.where(sums > budget.threshold, few, N)
    for layer in np.argsort(-sums, kind="stable"):
        if counts.sum() > L * mean:
            counts[layer] = few
    return counts


def dynamic(budget: DynamicShares, scores: np.ndarray, mean: int, least: int) -> np.ndarray:
    """DynamicKV: the counts of the layers."""
    L, _, N = scores.shape
    if mean >= N:
        return np.full(L, N)
    window = SINKS + RECENT
    floor = max(0, least - window)
    own = scores[..., SINKS : N - RECENT]
    kept = algorithm_1(own, mean - window - floor, budget.interval, budget.r_max, budget.code_rounding)
    return np.array([window + min(floor + len(layer[0]), N - window) for layer in kept])


def by_variance(scores: np.ndarray, mean: int, least: int) -> np.ndarray:
    """D2O: the counts of the layers, none of which is dense."""
    L, _, N = scores.shape
    if mean >= N:
        return np.full(L, N)
    v = scores.var(axis=2)
    v_max = v.max(axis=1, keepdims=True)
    v -= v.min(axis=1, keepdims=True)
    widest = v.max(axis=1, keepdims=True)
    e = np.exp(-np.where(widest > 1e-5 * v_max, v / np.maximum(widest, 1e-30), 0).mean(axis=1))
    floor = min(mean, max(least, math.ceil(N / 100)))
    wanted = np.clip(e / e.sum() * L * mean, floor, N)
    beyond = wanted - floor
    wanted -= max(0, wanted.sum() - L * mean) * beyond / max(beyond.sum(), 1e-30)
    counts = np.floor(wanted + 1e-4).astype(int)
    left = round(wanted.sum()) - counts.sum()
    counts[np.argsort(-(wanted - counts), kind="stable")[:left]] += 1
    return counts

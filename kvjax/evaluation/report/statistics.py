"""Statistics of results: bootstrap intervals, p-values, areas under curves, the largest compression at a tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from kvjax.evaluation.report.results import CellResults, Column, Results

DRAWS = 2000
ALL = 10  # the most examples of which every exchange is tried
FEWEST = 4  # examples of a task for an interval


class Interval(NamedTuple):
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


class Difference(NamedTuple):
    """A mean difference, its 95 % confidence interval and its two-sided p-value."""

    mean: float
    low: float
    high: float
    p: float


class Point(NamedTuple):
    """A point of a curve of accuracy against compression, the share of dropped entries."""

    compression: float
    accuracy: Interval


def headline(sums: Float[np.ndarray, "*R K+1"]) -> Float[np.ndarray, "*R"]:
    """The score of a task from sums over its answers: the geometric mean of the means of K scores, mostly of one."""
    means = sums[..., :-1] / sums[..., -1:]
    return np.prod(means, axis=-1) ** (1 / means.shape[-1])


def bootstrap(clusters: Sequence[Float[np.ndarray, "N K+1"]]) -> Float[np.ndarray, "R"]:
    """Means of R = DRAWS resampled sets. Examples of each task are drawn with replacement; task means are averaged.

    Each call draws the same examples of as many ones, so that differences are paired.

    Args:
        clusters: for each task, one row per example with the sums of its answers' scores and their number.
    """
    rng = np.random.default_rng(0)
    means = np.zeros(DRAWS)
    for rows in clusters:
        drawn = rows[rng.integers(len(rows), size=(DRAWS, len(rows)))].sum(axis=1)
        means += headline(drawn) / len(clusters)
    return means


@cache
def interval(cell: CellResults, columns: tuple[Column, ...]) -> Interval | None:
    """The mean of a cell's tasks with its bootstrap interval; None if a task is missing.

    With fewer than FEWEST examples of a task, low and high are NaN: too few examples show nothing of the spread.
    """
    clusters = [np.array(list(cell.clusters(column).values())) for column in columns]
    mean = cell.mean(columns)
    if mean is None or not all(map(len, clusters)):
        return None
    if min(map(len, clusters)) < FEWEST:
        return Interval(mean, math.nan, math.nan)
    low, high = np.quantile(bootstrap(clusters), [0.025, 0.975])
    return Interval(mean, float(low), float(high))


def difference(one: CellResults, other: CellResults, columns: Sequence[Column]) -> Difference | None:
    """The mean of `one` minus that of `other` on the questions that both answered.

    The interval is a paired bootstrap over examples, and the p-value that of a randomization test. With fewer than
    FEWEST such examples of a task, low, high and p are NaN. None if a task has no such example.
    """
    ours, theirs = list[Float[np.ndarray, "N K+1"]](), list[Float[np.ndarray, "N K+1"]]()
    for column in columns:
        mine, its = one.clusters(column, other), other.clusters(column, one)
        if not mine:
            return None
        ours.append(np.array([mine[name] for name in mine]))
        theirs.append(np.array([its[name] for name in mine]))
    if not ours:
        return None
    mean = float(np.mean([headline(a.sum(0)) - headline(b.sum(0)) for a, b in zip(ours, theirs, strict=True)]))
    if min(map(len, ours)) < FEWEST:
        return Difference(mean, math.nan, math.nan, math.nan)
    low, high = np.quantile(bootstrap(ours) - bootstrap(theirs), [0.025, 0.975])
    return Difference(mean, float(low), float(high), randomization(ours, theirs))


def randomization(ours: Sequence[Float[np.ndarray, "N K+1"]], theirs: Sequence[Float[np.ndarray, "N K+1"]]) -> float:
    """The two-sided p-value of a paired difference: that of Fisher's randomization test.

    It is the share of the ways to exchange the two policies' answers to some examples whose difference is at least as
    large. Up to ALL examples, all ways are tried, and from then on DRAWS ways beside that of no exchange. The p-value
    of five examples is therefore at least 2 / 2^5.

    Args:
        ours: for each task, one row per example with the sums of its answers' scores and their number.
        theirs: the same of the other policy, for the same examples.
    """
    examples = sum(map(len, ours))
    if examples <= ALL:
        exchanged = np.arange(2**examples)[:, None] >> np.arange(examples) & 1
    else:
        exchanged = np.random.default_rng(0).integers(2, size=(1 + DRAWS, examples))
        exchanged[0] = 0
    found, first = np.zeros(len(exchanged)), 0
    for mine, its in zip(ours, theirs, strict=True):
        moved = exchanged[:, first : first + len(mine)] @ (its - mine)
        found += headline(mine.sum(0) + moved) - headline(its.sum(0) - moved)
        first += len(mine)
    found = np.abs(found)
    return float(np.mean(found > found[0] - 1e-9))  # equal differences may differ in their last digits


def curve(results: Results, policy: str, question: str) -> list[Point]:
    """The points of accuracy against compression, including the full cache at 0 if it was measured."""
    cells = results.of(policy, question)
    full = results.full(question)
    if full is not None and all(cell is not full for cell in cells):
        cells = [full, *cells]
    found = [(cell.compression, interval(cell, results.columns)) for cell in cells]
    return [Point(compression, accuracy) for compression, accuracy in found if accuracy is not None]


def area(points: Sequence[Point]) -> float | None:
    """The mean accuracy between the smallest and the largest compression, by the trapezoidal rule.

    None if the points have fewer than two different compressions.
    """
    x, y = np.array([point.compression for point in points]), np.array([point.accuracy.mean for point in points])
    if len(points) < 2 or np.ptp(x) == 0:
        return None
    return float(np.trapezoid(y, x) / np.ptp(x))


def largest_compression(results: Results, policy: str, question: str, tolerance: float) -> float | None:
    """The largest compression with a loss of at most `tolerance` of the full cache's scores (KVCompose, eq. 10).

    The loss of a task is (full - this) / full, averaged over the tasks at which the full cache scores above 0. Losses
    between measured points are interpolated linearly. The result is the first crossing of the tolerance, so that all
    smaller compressions are within it as well. None if the full cache was not measured.
    """
    full = results.full(question)
    if full is None:
        return None
    base = {column: full.headline(column) for column in results.columns}
    counted = {column: score for column, score in base.items() if score}
    if not counted:
        return None
    last, lost = 0.0, 0.0
    for cell in results.of(policy, question):
        scores = {column: cell.headline(column) for column in counted}
        if None in scores.values():
            continue
        loss = float(np.mean([(counted[c] - score) / counted[c] for c, score in scores.items() if score is not None]))
        here = cell.compression
        if loss > tolerance:
            return last + (here - last) * (tolerance - lost) / (loss - lost) if here > last else last
        last, lost = here, loss
    return last

"""Statistics of results: bootstrap intervals, areas under curves, and the largest compression at a tolerance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from kvjax.evaluation.report.results import CellResults, Column, Results

DRAWS = 2000
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
    """The mean of `one` minus that of `other` on the questions that both answered, by paired bootstrap over examples.

    With fewer than FEWEST such examples of a task, low, high and p are NaN. None if a task has no such example.
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
    drawn = np.round(bootstrap(ours) - bootstrap(theirs), 12)  # equal sums may differ in their last digits
    low, high = np.quantile(drawn, [0.025, 0.975])
    p = 2 * min(float(np.mean(drawn <= 0)), float(np.mean(drawn >= 0)))
    return Difference(mean, float(low), float(high), min(1.0, p))


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

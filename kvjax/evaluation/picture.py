"""Draws accuracy against budget and memory. Needs matplotlib, which the extra `plot` installs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvjax.files.writing import new_file

# Distinguishable with colour blindness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
PICTURES = (".png", ".pdf", ".svg")  # the suffixes of a picture


def accuracy_by_budget(
    path: str | os.PathLike[str],
    curves: Mapping[str, Sequence[tuple[int, float]]],
    *,
    full: float,
    title: str,
) -> None:
    """Writes a PNG with a curve for each policy and a horizontal line for the full cache.

    Args:
        path: the file to write.
        curves: the (budget, accuracy from 0 to 1) points of each policy; budgets are entries per kv head.
        full: the accuracy of the full cache, from 0 to 1.
        title: the title of the picture.

    Raises:
        ImportError: if matplotlib is not installed.
        OSError: if the file cannot be written. It is then as it was.
    """
    from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

    figure, (axes,) = new_figure(1, width=6, height=5)
    axes.axhline(full, color="0.35", linestyle="--", linewidth=1.5, zorder=1)
    budgets = sorted({budget for points in curves.values() for budget, _ in points})
    ends = [End("full cache", budgets[0], full, "0.35")] if budgets else []
    for i, (name, points) in enumerate(curves.items()):
        x, y = zip(*sorted(points), strict=True)
        axes.plot(
            x,
            y,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=8,
            markeredgecolor="white",
            linewidth=2,
            zorder=2 + i,
        )
        ends.append(End(name, x[0], y[0], COLOURS[i % len(COLOURS)]))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.invert_xaxis()
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("budget (entries per kv head)")
    axes.set_ylabel("exact match")
    axes.set_title(title, loc="left", fontsize=11)
    name_ends(axes, ends, size=9)
    with new_file(path) as new:
        figure.savefig(new, dpi=150)


class Place(NamedTuple):
    """The score of a policy from 0 to 1, its interval, whose ends may be NaN, and the bytes of a row's cache."""

    name: str
    bytes: float
    score: float
    low: float
    high: float


def accuracy_by_memory(path: str | os.PathLike[str], panels: Mapping[str, Sequence[Place]], *, score: str) -> None:
    """Writes a picture with a panel for each title: a point with its interval for each policy.

    Args:
        path: the file to write; its suffix is one of PICTURES.
        panels: the policies of each panel.
        score: the name of the score.

    Raises:
        ImportError: if matplotlib is not installed.
        OSError: if the file cannot be written. It is then as it was.
    """
    figure, drawn = new_figure(len(panels), width=6, height=4)
    most = max(place.bytes for places in panels.values() for place in places) / 1e6
    for axes, (title, places) in zip(drawn, panels.items(), strict=True):
        ends = []
        for i, place in enumerate(places):
            colour, x, y = COLOURS[i % len(COLOURS)], place.bytes / 1e6, 100 * place.score
            if not math.isnan(place.low):
                axes.errorbar(
                    [x], [y], bars([place[2:]]), fmt="none", ecolor=colour, elinewidth=1.5, capsize=3, zorder=2
                )
            style = {"marker": MARKERS[i % len(MARKERS)], "markersize": 9, "markeredgecolor": "white"}
            axes.plot([x], [y], color=colour, linestyle="none", zorder=3 + i, **style)
            ends.append(End(place.name, x, y, colour))
        axes.set_xlim(0, 1.05 * most)
        axes.set_ylim(0, 104)
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("cache of a prompt and its answer, MB")
        name_ends(axes, ends, size=9)
    drawn[0].set_ylabel(f"{score}, %")
    with new_file(path) as new:
        figure.savefig(new, dpi=150)


def bars(intervals: Sequence[Sequence[float]]) -> list[list[float]]:
    """The lengths in percent of the bars below and above the points of intervals (mean, low, high).

    A mean of equal scores may lie outside its interval by its last digit, and matplotlib refuses a negative length.
    """
    below = [max(0.0, 100 * (mean - low)) for mean, low, _ in intervals]
    return [below, [max(0.0, 100 * (high - mean)) for mean, _, high in intervals]]


class End(NamedTuple):
    """The right end of a line, in data coordinates, with its name."""

    name: str
    x: float
    y: float
    colour: str


def name_ends(axes: Any, ends: Sequence[End], size: float) -> None:
    """Writes names beside the ends of lines, right of the panel, in letters of `size` points.

    The y axis is linear and has its limits. Names that would overlap move apart.
    """
    low, high = axes.get_ylim()
    height = 72 * axes.figure.get_figheight() * axes.get_position().height  # points
    ordered = sorted(ends, key=lambda end: end.y)
    places = spread([end.y for end in ordered], 1.25 * size / height * (high - low), low, high)
    for end, place in zip(ordered, places, strict=True):
        axes.annotate(
            end.name,
            xy=(end.x, end.y),
            xytext=(1.03, place),
            textcoords=axes.get_yaxis_transform(),
            color=end.colour,
            fontsize=size,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": end.colour, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3},
        )


def spread(values: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Ascending places near ascending values, `gap` apart and within `low` .. `high`, or closer if there is no room."""
    gap = min(gap, (high - low) / max(len(values) - 1, 1))
    places: list[float] = []
    for value in values:
        places.append(max(value, low if not places else places[-1] + gap))
    top = high
    for i in reversed(range(len(places))):
        places[i] = min(places[i], top)
        top = places[i] - gap
    return places


def new_figure(count: int, width: float, height: float) -> tuple[Any, Sequence[Any]]:
    """A figure with `count` panels, up to three per row. Raises ImportError if matplotlib is not installed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # needs no display and no global state
    from matplotlib.figure import Figure

    across = min(count, 3)
    down = -(-count // across)
    figure = Figure(figsize=(width * across + 2, height * down), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    found = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in found[count:]:
        axes.set_visible(False)
    for axes in found:
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found[:count]

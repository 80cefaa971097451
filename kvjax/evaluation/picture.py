"""Draws accuracy against budget. Needs matplotlib, which the extra `plot` installs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.files.writing import new_file

# Distinguishable with colour blindness.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


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
    axes.axhline(full, color="0.35", linestyle="--", linewidth=1.5, label="full cache", zorder=1)
    budgets = sorted({budget for points in curves.values() for budget, _ in points})
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
            label=name,
            zorder=2 + i,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.set_ylim(-0.04, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("budget (entries per kv head)")
    axes.set_ylabel("exact match")
    axes.set_title(title, loc="left", fontsize=11)
    figure.legend(loc="outside right center", frameon=False)
    with new_file(path) as new:
        figure.savefig(new, dpi=150)


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

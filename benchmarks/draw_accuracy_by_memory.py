"""Draws docs/pictures/accuracy_by_memory.png, the README's picture, from published runs of the leaderboard.

    python -m benchmarks.draw_accuracy_by_memory

It runs no model. Accuracies are those of TASKS in percent, with the bootstrap intervals of `kvjax report`. Memory is
that of a prompt's cache once it is compressed. matplotlib comes with the extra `plot`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator

from kvjax.evaluation.picture import COLOURS, MARKERS, bars
from kvjax.evaluation.report.results import CellResults, Column, Results, read_results
from kvjax.evaluation.report.statistics import Interval, interval

DOCS = Path(__file__).resolve().parents[1] / "docs"
RUNS = [DOCS / "results/leaderboard" / name for name in ("once", "shares")]
TASKS: tuple[Column, ...] = (("ruler/niah_multiquery", 4096),)
QUESTION = "after"
NAMES = {  # the places of the names, beside a point: its budget, points to the right, points up, and the side
    "leverage_score": (0.125, -12, 4, "right"),
    "compactor": (0.125, -12, 0, "right"),
    "lagkv": (0.25, 12, -8, "left"),
    "keydiff": (0.125, -12, 10, "right"),
    "streaming_llm, kvpress": (0.5, 12, 0, "left"),
    "snapkv": (0.5, 12, 0, "left"),
}
TITLE = "Nearly the same answers from a quarter of the cache"
PAPER = "#fbfbf9"  # light, and less glaring than white on a dark page


def place_of(cell: CellResults) -> tuple[float, Interval]:
    """The megabytes of a cell's cache, and the mean of its answers with its interval."""
    found = interval(cell, TASKS)
    assert found is not None, f"{cell.name} lacks answers"
    bytes_ = [line["kv_bytes"] for line in cell.lines if (line["task"], line["length"]) in TASKS]
    return float(np.mean(bytes_)) / 1e6, found


def draw(axes: Any, results: Results) -> None:
    whole = results.full(QUESTION)
    assert whole is not None
    megabytes, (accuracy, *_) = place_of(whole)
    for i, (policy, (budget, right, up, side)) in enumerate(NAMES.items()):
        cells = results.of(policy, QUESTION)
        x, intervals = zip(*map(place_of, cells), strict=True)
        y = [100 * each.mean for each in intervals]
        colour, style = COLOURS[i], {"marker": MARKERS[i], "markeredgecolor": PAPER, "markersize": 12}
        axes.errorbar(x, y, bars(intervals), color=colour, linewidth=3, elinewidth=2, **style)
        at = next(i for i, cell in enumerate(cells) if cell.name.budget == budget)
        name = policy.removesuffix(", kvpress")
        axes.annotate(name, (x[at], y[at]), (right, up), textcoords="offset points", color=colour, ha=side, va="center")
    axes.plot(megabytes, 100 * accuracy, color="0.25", marker="*", markersize=24, zorder=9)
    axes.annotate(
        "full cache", (megabytes, 100 * accuracy), (0, -16), textcoords="offset points", ha="center", va="top"
    )
    shade = np.minimum.outer(np.linspace(1, 0, 64), np.linspace(1, 0, 64))  # towards the upper left corner
    axes.imshow(
        shade, extent=(0, 0.45, 0.55, 1), transform=axes.transAxes, cmap="Greens", vmax=4, aspect="auto", zorder=0
    )
    axes.text(0.02, 0.965, "better", transform=axes.transAxes, color="#1b7837", style="italic", va="top")
    axes.set_xscale("log", base=2)
    axes.set_xlim(megabytes / 18, 1.25 * megabytes)
    axes.set_ylim(-3, 109)
    shares = (1 / 8, 1 / 4, 1 / 2, 1)
    axes.set_xticks([share * megabytes for share in shares], [f"{share * megabytes:.0f}" for share in shares])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="0.88")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("memory of the KV cache, MB per prompt")
    axes.set_ylabel("correct answers, %")


def main() -> None:
    (results,) = read_results(RUNS)
    with rc_context({"font.size": 16, "axes.facecolor": PAPER, "figure.facecolor": PAPER}):
        layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
        figure = Figure(figsize=(28 / 3, 6), dpi=150, layout=layout)  # 1,400 pixels, shown as 700
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        draw(axes, results)
        axes.set_title(TITLE, loc="left", fontsize=19, weight="bold", pad=14)
        figure.savefig(DOCS / "pictures/accuracy_by_memory.png")


if __name__ == "__main__":
    main()

"""Draws docs/pictures/accuracy_by_memory.png, the README's picture, from the tables of two reports in docs/results.

    python -m benchmarks.draw_accuracy_by_memory

It runs no model. Accuracies are the means of the seven tasks of the demo model with the question unknown, in percent.
Memory is the size of a row's cache at the end of an answer, with the room that it reserves. The full cache is drawn at
what its tokens take, without room. matplotlib comes with the extra `plot`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator

from kvjax.evaluation.picture import COLOURS, MARKERS

DOCS = Path(__file__).resolve().parents[1] / "docs"
REPORTS = ("methods", "once")  # the same questions
SETTING = "question unknown while compressing"
BUDGETS = ("50 % kept", "25 % kept", "10 % kept")
NAMES = {  # the places of the names, beside the smallest caches: points to the right, points up, and the side
    "leverage_score": (-10, 8, "right"),
    "kvcompose": (-10, -3, "right"),
    "dynamickv": (-10, -9, "right"),
    "snapkv": (-10, 0, "right"),
    "kvmerger": (9, -10, "left"),
    "morphkv": (-10, 8, "right"),
    "streaming_llm": (9, -10, "left"),
}
PAPER = "#fbfbf9"  # light, and less glaring than white on a dark page


class Point(NamedTuple):
    megabytes: float
    mean: float
    low: float
    high: float


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of each row of the table of a report under a bold title that contains `title` and the setting."""
    found = re.search(rf"\*\*[^\n]*{title}[^\n]*{SETTING}\*\*\n\n((?:\|[^\n]*\n)+)", text)
    if found is None:
        raise SystemExit(f"the report has no table {title!r}, {SETTING}")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def ends_of(cell: str) -> tuple[float, float, float]:
    """A mean and the ends of its interval, of a cell such as "83.3 (50.0 to 100.0)" or "83.3 ± 20.8"."""
    mean, *ends = map(float, re.findall(r"[\d.]+", cell))
    low, high = (mean - ends[0], mean + ends[0]) if len(ends) == 1 else ends
    return mean, max(low, 0.0), min(high, 100.0)


def points() -> dict[tuple[str, str], Point]:
    """Returns what the reports have of each policy and budget."""
    found = {}
    for report in REPORTS:
        text = (DOCS / f"results/{report}/report.md").read_text()
        sizes = rows(text, "cache size")[2:]
        megabytes = {(row[0], row[1]): float(row[3]) for row in sizes}
        full = next(float(row[3]) / float(row[4]) for row in sizes if row[0] == "full")
        header, _, *means = rows(text, "mean of 7 tasks")
        for policy, *cells in means:
            for budget, cell in zip(header[1:], cells, strict=True):
                size = full if policy == "full" else megabytes.get((policy, budget))
                if cell and size:
                    found[policy, budget] = Point(size, *ends_of(cell))
    return found


def draw(axes: Any, found: dict[tuple[str, str], Point]) -> None:
    full = found["full", BUDGETS[0]]
    for (policy, (right, up, side)), colour, marker in zip(NAMES.items(), COLOURS, MARKERS, strict=True):
        x, y, low, high = np.array([found[policy, budget] for budget in BUDGETS if (policy, budget) in found]).T
        style: dict[str, Any] = {"color": colour, "marker": marker, "markeredgecolor": PAPER, "markersize": 12}
        axes.errorbar(x, y, [y - low, high - y], linewidth=3, elinewidth=2, **style)
        axes.annotate(
            policy, (x[-1], y[-1]), (right, up), textcoords="offset points", color=colour, ha=side, va="center"
        )
    axes.plot(full.megabytes, full.mean, color="0.25", marker="*", markersize=24, zorder=9)
    axes.annotate(
        "full cache", (full.megabytes, full.mean), (0, -16), textcoords="offset points", ha="center", va="top"
    )
    shade = np.minimum.outer(np.linspace(1, 0, 64), np.linspace(1, 0, 64))  # towards the upper left corner
    axes.imshow(
        shade, extent=(0, 0.45, 0.55, 1), transform=axes.transAxes, cmap="Greens", vmax=4, aspect="auto", zorder=0
    )
    axes.text(0.02, 0.965, "better", transform=axes.transAxes, color="#1b7837", style="italic", va="top")
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.3, 5.5)
    axes.set_ylim(0, 106)
    axes.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="0.88")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("memory of the KV cache, MB per prompt")
    axes.set_ylabel("correct answers, %")


def main() -> None:
    with rc_context({"font.size": 16, "axes.facecolor": PAPER, "figure.facecolor": PAPER}):
        layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
        figure = Figure(figsize=(28 / 3, 6), dpi=150, layout=layout)  # 1,400 pixels, shown as 700
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        draw(axes, points())
        axes.set_title("The same answers from a quarter of the entries", loc="left", fontsize=19, weight="bold", pad=14)
        figure.savefig(DOCS / "pictures/accuracy_by_memory.png")


if __name__ == "__main__":
    main()

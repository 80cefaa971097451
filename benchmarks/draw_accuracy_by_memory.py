"""Draws docs/pictures/accuracy_by_memory.png, the README's picture, from the tables of docs/results/methods/report.md.

    python -m benchmarks.draw_accuracy_by_memory

It runs no model. Accuracies are the means of the seven tasks of the demo model with the question unknown, in percent.
Memory is the size of a row's cache at the end of an answer. matplotlib comes with the extra `plot`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kvjax.evaluation.picture import COLOURS, MARKERS, End, name_ends

DOCS = Path(__file__).resolve().parents[1] / "docs"
SETTING = "question unknown while compressing"
POLICIES = ("kvcompose", "dynamickv", "snapkv", "kvcrush on snapkv", "kvmerger", "morphkv", "streaming_llm")
BUDGETS = ("50 % kept", "25 % kept", "10 % kept")
LETTERS = 16  # points; the picture is shown at half its size
BYTES_PER_TOKEN = 4096  # of the demo model's keys and values in float32: 2 x 4 layers x 2 kv heads x 64 channels x 4


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of each row of the table of the report under a bold title that contains `title` and the setting."""
    found = re.search(rf"\*\*[^\n]*{title}[^\n]*{SETTING}\*\*\n\n((?:\|[^\n]*\n)+)", text)
    if found is None:
        raise SystemExit(f"the report has no table {title!r}, {SETTING}")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]


def ends_of(cell: str) -> tuple[float, float, float]:
    """A mean and the ends of its interval, of a cell such as "83.3 (50.0 to 100.0)" or "83.3 ± 20.8"."""
    mean, *ends = map(float, re.findall(r"[\d.]+", cell))
    low, high = (mean - ends[0], mean + ends[0]) if len(ends) == 1 else ends
    return mean, max(low, 0.0), min(high, 100.0)


def main() -> None:
    text = (DOCS / "results/methods/report.md").read_text()
    means = rows(text, "mean of 7 tasks")
    budgets = means[0][1:]
    accuracy = {
        (row[0], budget): ends_of(cell)
        for row in means[2:]
        for budget, cell in zip(budgets, row[1:], strict=True)
        if cell
    }
    megabytes = {(row[0], row[1]): float(row[3]) for row in rows(text, "cache size")[2:]}
    full = 1024 * BYTES_PER_TOKEN / 1e6
    with rc_context({"font.size": LETTERS}):
        figure = Figure(figsize=(14, 7.6), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot([full], [100], color="0.35", marker="*", markersize=24, linestyle="", zorder=9)
        axes.annotate(
            "full cache", (full, 100), xytext=(14, -20), textcoords="offset points", color="0.35", ha="center", va="top"
        )
        axes.set_ylim(0, 104)
        ends = []
        for policy, colour, marker in zip(POLICIES, COLOURS, MARKERS, strict=True):
            x = [megabytes[policy, budget] for budget in BUDGETS]
            y, low, high = np.array([accuracy[policy, budget] for budget in BUDGETS]).T
            style: dict[str, Any] = {
                "color": colour,
                "marker": marker,
                "markeredgecolor": "white",
                "markersize": 11,
                "linewidth": 3,
            }
            axes.errorbar(x, y, [y - low, high - y], elinewidth=2, **style)
            ends.append(End(policy, x[-1], y[-1], colour))
        axes.set_xscale("log", base=2)
        axes.set_xticks([4, 2, 1, 0.5, 0.25], ["4", "2", "1", "0.5", "0.25"])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.invert_xaxis()
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("KV cache per row at the end of an answer, MB")
        axes.set_ylabel("correct answers, %")
        axes.set_title(
            "50, 25 and 10 % of a text of 1,024 tokens retained; question unknown", loc="left", fontsize=LETTERS
        )
        name_ends(axes, ends, size=LETTERS)
        figure.savefig(DOCS / "pictures/accuracy_by_memory.png")


if __name__ == "__main__":
    main()

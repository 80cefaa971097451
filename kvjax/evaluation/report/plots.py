"""Plots of results as PNG files. They need matplotlib, which the extra `plot` installs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.checks import is_number
from kvjax.evaluation.picture import COLOURS, MARKERS, End, bars, name_ends, new_figure
from kvjax.evaluation.report import escape
from kvjax.evaluation.report.results import CellResults, Results
from kvjax.evaluation.report.statistics import area, curve
from kvjax.evaluation.report.tables import MEANING, budget_text

SHOWN = len(COLOURS) - 1  # the number of policies with a colour; the others are light grey
SHARES = (100, 50, 25, 10, 5, 2, 1, 0.5, 0.2, 0.1)  # percent
ALIKE = 0.002  # the difference of shares that no line shows
PANELS = 6  # the largest number of policies in the plot of layers


def curves(path: Path, results: Results) -> bool:
    """Draws accuracy against the retained share with 95 % intervals, in one panel per setting.

    The best policies have colours and names.
    Returns whether there was anything to draw, as all plots do.
    """
    found = {
        question: {
            policy: points
            for policy in results.policies
            if len(results.of(policy, question)) > 1
            and (points := [point for point in curve(results, policy, question) if point.compression < 1])
        }
        for question in results.settings
    }
    found = {question: drawn for question, drawn in found.items() if drawn}
    if not found:
        return False
    figure, panels = new_figure(len(found), width=6.5, height=4.5)
    ranked = sorted(
        dict.fromkeys(policy for drawn in found.values() for policy in drawn),
        key=lambda policy: -max(area(drawn.get(policy, [])) or 0 for drawn in found.values()),
    )
    colours = dict(zip(ranked, COLOURS[:SHOWN], strict=False))
    for axes, (question, drawn) in zip(panels, found.items(), strict=True):
        ends = []
        shares = [100 * (1 - point.compression) for points in drawn.values() for point in points]
        for policy in reversed(ranked):
            if not (points := drawn.get(policy, [])):
                continue
            x = [100 * (1 - point.compression) for point in points]
            y = [100 * point.accuracy.mean for point in points]
            colour = colours.get(policy)
            if colour is None:
                axes.plot(x, y, color="0.8", linewidth=1, zorder=1)
                continue
            place = ranked.index(policy)
            style = {"marker": MARKERS[place], "markeredgecolor": "white", "linewidth": 2, "zorder": 3}
            axes.plot(x, y, color=colour, **style)
            spreads = bars([point.accuracy for point in points])
            beside = np.array(x) * 1.015 ** (place - len(colours) / 2)  # so that bars do not hide one another
            axes.errorbar(beside, y, spreads, fmt="none", ecolor=colour, elinewidth=1, zorder=2)
            ends.append(End(escape.plot(policy), x[-1], y[-1], colour))
        full = results.full(question)
        if full is not None and (mean := full.mean(results.columns)) is not None:
            axes.axhline(100 * mean, color="0.35", linestyle="--", linewidth=1.5, zorder=1)
            ends.append(End("full cache", min(shares), 100 * mean, "0.35"))
        title = MEANING[question] + (
            f"; grey: {others} other policies" if (others := len(ranked) - len(colours)) else ""
        )
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("retained entries of the prompt, %")
        axes.set_xscale("log")
        ticks = [share for share in SHARES if share >= min(shares) * 0.9]
        axes.set_xticks(ticks, [f"{share:g}" for share in ticks])
        axes.set_xticks([], minor=True)
        axes.invert_xaxis()
        axes.set_ylim(0, 104)
        name_ends(axes, ends, size=8)
    panels[0].set_ylabel(f"mean score of {results.tasks}, %")
    figure.savefig(path)
    return True


def needles(path: Path, results: Results, question: str) -> bool:
    """Draws the recall of needles as a heat map over length and depth, for each policy and budget."""

    def grid(cell: CellResults) -> dict[tuple[float, float], list[float]]:
        places: dict[tuple[float, float], list[float]] = {}
        for line in cell.lines:
            depth, length = line["meta"].get("depth"), line["meta"].get("length", line["length"])
            if line["task"].startswith("needle/") and line["scores"] and is_number(depth) and is_number(length):
                places.setdefault((depth, length), []).append(next(iter(line["scores"].values())))
        return places

    maps = {name: grid(cell) for name, cell in results.cells.items() if name.question == question}
    maps = {name: places for name, places in maps.items() if places}
    if not maps:
        return False
    figure, panels = new_figure(len(maps), width=4.5, height=3.2)
    for axes, (name, places) in zip(panels, maps.items(), strict=True):
        depths, lengths = (sorted({place[axis] for place in places}) for axis in (0, 1))
        values = np.full((len(depths), len(lengths)), np.nan)
        for (depth, length), scores in places.items():
            values[depths.index(depth), lengths.index(length)] = np.mean(scores)
        image = axes.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, fontsize=7)
        axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=7)
        title = f"{escape.plot(name.policy)}, {budget_text(name.budget)}: {100 * np.nanmean(values):.1f}"
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("prompt tokens", fontsize=8)
        axes.set_ylabel("depth", fontsize=8)
        axes.grid(False)
    figure.colorbar(image, ax=panels, shrink=0.7)
    figure.savefig(path)
    return True


def layers(path: Path, results: Results, question: str) -> bool:
    """Draws the retained share per layer and task: the mean and the range from 5 to 95 %.

    Only policies that give layers different budgets are drawn.
    """

    def shares(cell: CellResults) -> dict[str, np.ndarray]:
        by_task: dict[str, list[np.ndarray]] = {}
        for line in cell.lines:
            by_task.setdefault(line["task"], []).append(np.array(line["kept"]) / line["compressed_tokens"])
        return {task: np.array(rows) for task, rows in by_task.items()}

    chosen = []
    for policy in results.policies:
        cells = [cell for cell in results.of(policy, question) if cell.compression > 0]
        if cells and any(np.ptp(line["kept"]) > 1 for line in cells[-1].lines):
            chosen.append(cells[len(cells) // 2])
    chosen = chosen[:PANELS]
    if not chosen:
        return False
    figure, panels = new_figure(len(chosen), width=4.5, height=3.2)
    named: dict[str, Any] = {}
    for axes, cell in zip(panels, chosen, strict=True):
        by_task = shares(cell)
        means = np.array([rows.mean(axis=0) for rows in by_task.values()])
        if len(means) > 1 and np.ptp(means, axis=0).max() < ALIKE:
            by_task = {"all tasks alike": np.concatenate(list(by_task.values()))}
        for task, rows in by_task.items():
            colour = "0.35" if len(by_task) == 1 else COLOURS[list(by_task).index(task) % len(COLOURS)]
            x = range(rows.shape[1])
            (named[task],) = axes.plot(x, 100 * rows.mean(axis=0), color=colour, linewidth=1.5)
            axes.fill_between(x, *(100 * np.quantile(rows, [0.05, 0.95], axis=0)), color=colour, alpha=0.1, linewidth=0)
        axes.set_title(f"{escape.plot(cell.name.policy)}, {budget_text(cell.name.budget)}", fontsize=9)
        axes.set_xlabel("layer", fontsize=8)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("retained entries of the prompt, %", fontsize=8)
        axes.tick_params(labelsize=8)
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, top)
    figure.legend(named.values(), map(escape.plot, named), loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path)
    return True


Draw = Callable[[Path, Results, str], bool]
BY_SETTING: dict[str, tuple[Draw, str]] = {
    "needles": (needles, "Recall of needles"),
    "layers": (layers, "Retained entries per layer"),
}

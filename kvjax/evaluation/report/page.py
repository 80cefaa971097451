"""Writes the report of runs: a Markdown page, each table as CSV and LaTeX, and the plots."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from kvjax.checks import did_you_mean, installs, shown
from kvjax.evaluation.report import escape, plots, tables
from kvjax.evaluation.report.results import Results, asked_by
from kvjax.evaluation.report.tables import MEANING, Table
from kvjax.files.writing import new_folder

PAGE = "report.md"
OWNED = re.compile(
    rf"{re.escape(PAGE)}|(model\d+/)?"
    r"(means\.csv|(scores|averages|costs|against|compression_at|area)(_[^/]*)?\.(csv|tex)|(curves|(needles|layers)_[^/]*)\.png)"
)
ARGUMENT = "overwrite=True (--overwrite)"


def write(
    out: Path,
    several: Sequence[Results],
    against: Sequence[str],
    say: Callable[[str], None],
    overwrite: bool = False,
) -> str:
    """Writes the report into a folder and returns the text of its page, `report.md`.

    The folder changes only when everything is written, so that an error or a kill leaves it as it was.

    Args:
        out: an empty or absent folder.
        several: the results of each model.
        against: the policies that all others are compared with.
        say: receives a notice if plots are left out.
        overwrite: whether the folder may hold files. An earlier report is then replaced, and all other files stay.

    Raises:
        ValueError: if the results lack a policy in `against`, if the folder is not empty and `overwrite` is False, if a
            folder has the name of a file to write, or if another process is writing the folder.
        OSError: if the folder or a file cannot be written.
    """
    known = list(dict.fromkeys(policy for results in several for policy in results.policies))
    for policy in against:
        if policy not in known:
            near = did_you_mean(policy, known)
            raise ValueError(f"policy {shown(policy)} is not in the results: expected one of {', '.join(known)}{near}")
    with new_folder(out, OWNED, PAGE, overwrite=overwrite, argument=ARGUMENT) as folder:
        folder.mkdir()
        return _write(folder, several, against, say)


def _write(out: Path, several: Sequence[Results], against: Sequence[str], say: Callable[[str], None]) -> str:
    parts: list[str] = []
    for i, results in enumerate(several):
        folder = out if len(several) == 1 else out / f"model{i + 1}"
        folder.mkdir(exist_ok=True)
        parts += [f"# {escape.markdown(results.title or results.model)}", *_counted(results)]
        for question in results.settings:
            made = [
                *tables.scores(results, question),
                tables.averages(results, question),
                tables.costs(results, question),
            ]
            compared = (tables.comparison(results, question, policy) for policy in against)
            parts += [_saved(folder, table) for table in [*made, *compared] if table is not None]
        (folder / "means.csv").write_text(tables.means(results).csv(), encoding="utf-8")
        parts += _plots(out, folder, results, say)
    overall = tables.robustness(several)
    if overall:
        parts += ["# Over all budgets", *(_saved(out, table) for table in overall)]
    page = "\n\n".join(parts) + "\n"
    (out / PAGE).write_text(page, encoding="utf-8")
    return page


def _counted(results: Results) -> list[str]:
    answers, model = sum(len(cell.lines) for cell in results.cells.values()), escape.markdown(results.model)
    text = f"{answers:,} answers of {model} under {len(results.policies)} policies, {results.tasks}."
    if results.errors:
        text += f" **Missing because of errors: {results.errors:,}**; the results file lists them."
    if results.dropped:
        dropped = ", ".join(map(escape.markdown, results.dropped))
        text += f" The grid no longer asks {dropped}; the report has their earlier answers."
    if _unequal(results):
        text += (
            " **Some policies have answers to other questions of a task than others**, so their scores are not "
            "comparable; `--against` compares the questions that both answered."
        )
    settings = "; ".join(f"`{setting}`: {MEANING[setting]}" for setting in results.settings)
    return [f"{text} {settings}. In both settings, all tokens of an answer are decoded from the compressed cache."]


def _unequal(results: Results) -> bool:
    """Returns whether some policies have answers to other questions of a task, as of a run that was killed."""
    asked: dict[tuple[object, ...], set[frozenset[tuple[object, ...]]]] = {}
    for name, cell in results.cells.items():
        for column, lines in cell.by_column.items():
            asked.setdefault((name.question, column), set()).add(frozenset(map(asked_by, lines)))
    return any(len(each) > 1 for each in asked.values())


def _saved(folder: Path, table: Table) -> str:
    (folder / f"{table.name}.csv").write_text(table.csv(), encoding="utf-8")
    (folder / f"{table.name}.tex").write_text(table.latex(), encoding="utf-8")
    return table.markdown()


def _plots(out: Path, folder: Path, results: Results, say: Callable[[str], None]) -> list[str]:
    """Draws the plots that have data and returns their Markdown."""
    found = []
    try:
        if plots.curves(folder / "curves.png", results):
            found.append(("Accuracy against compression", folder / "curves.png"))
        for question in results.settings:
            for name, (draw, title) in plots.BY_SETTING.items():
                path = folder / f"{name}_{question}.png"
                if draw(path, results, question):
                    found.append((f"{title}, {MEANING[question]}", path))
    except ImportError:
        say(f"there are no plots, because matplotlib is not installed: expected {installs('plot')}")
    return [f"![{title}]({path.relative_to(out)})" for title, path in found]

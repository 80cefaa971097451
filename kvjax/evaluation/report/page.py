"""Writes the report of runs: a Markdown page, each table as CSV and LaTeX, and the plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvjax.evaluation.report import plots, tables
from kvjax.evaluation.report.results import Results
from kvjax.evaluation.report.tables import MEANING, Table


def write(out: Path, several: Sequence[Results], against: Sequence[str], say: Callable[[str], None]) -> str:
    """Writes the report into a folder and returns the text of its page, `report.md`.

    Args:
        out: the folder.
        several: the results of each model.
        against: the policies that all others are compared with.
        say: receives a notice if plots are left out.

    Raises:
        ValueError: if the results lack a policy in `against`.
    """
    known = list(dict.fromkeys(policy for results in several for policy in results.policies))
    for policy in against:
        if policy not in known:
            raise ValueError(f"policy {policy!r} is not in the results: expected one of {', '.join(known)}")
    out.mkdir(parents=True, exist_ok=True)
    parts: list[str] = []
    for i, results in enumerate(several):
        folder = out if len(several) == 1 else out / f"model{i + 1}"
        folder.mkdir(exist_ok=True)
        parts += [f"# {results.title or results.model}", *_counted(results)]
        made = [table for question in results.settings for table in _tables(results, question, against)]
        parts += [_saved(folder, table) for table in made]
        parts += _plots(out, folder, results, say)
    overall = tables.robustness(several)
    if overall:
        parts += ["# Over all budgets", *(_saved(out, table) for table in overall)]
    page = "\n\n".join(parts) + "\n"
    (out / "report.md").write_text(page, encoding="utf-8")
    return page


def _counted(results: Results) -> list[str]:
    answers = sum(len(cell.lines) for cell in results.cells.values())
    text = (
        f"{answers:,} answers of {results.model} under {len(results.policies)} policies, {len(results.columns)} tasks."
    )
    if results.errors:
        text += f" **{results.errors:,} answers are missing because of errors**, which the results file lists."
    settings = "; ".join(f"`{setting}`: {MEANING[setting]}" for setting in results.settings)
    return [f"{text} {settings}. In both settings, all tokens of an answer are decoded from the compressed cache."]


def _tables(results: Results, question: str, against: Sequence[str]) -> list[Table]:
    made = [*tables.scores(results, question), tables.averages(results, question), tables.costs(results, question)]
    compared = (tables.comparison(results, question, policy) for policy in against)
    return [*made, *(table for table in compared if table is not None)]


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
        say('there are no plots, because matplotlib is not installed; pip install "kvjax[plot]" installs it')
    return [f"![{title}]({path.relative_to(out)})" for title, path in found]

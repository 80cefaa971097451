"""Tables of results, which can be written as Markdown, CSV and LaTeX. Scores are in percent."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from kvjax.evaluation.entries import Budget
from kvjax.evaluation.lines import decoding_speed
from kvjax.evaluation.report import escape
from kvjax.evaluation.report.results import CellResults, Column, Results
from kvjax.evaluation.report.statistics import FEWEST, area, curve, difference, interval, largest_compression

TOLERANCES = (0.2, 0.1)
MEANS = ("policy", "budget", "question", "task", "length", "mean", "low", "high", "n")
MEANING = {"after": "question unknown while compressing", "before": "question seen while compressing"}


@dataclass(frozen=True)
class Table:
    """Rows of text under headings.

    Attributes:
        name: the name of the table's files, without extension.
        title: the title or caption.
        headings: the headings of the columns.
        rows: the cells of each row.
        best: the indices of the columns whose highest number is set in bold.
        apart: the number of leading rows that are excluded from the comparison.
    """

    name: str
    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: tuple[int, ...] = ()
    apart: int = 0

    def bold(self) -> set[tuple[int, int]]:
        """The cells (row, column) that have the highest number of their column."""
        found = set()
        for column in self.best:
            values = {row: escape.number(cells[column]) for row, cells in enumerate(self.rows) if row >= self.apart}
            known = {row: value for row, value in values.items() if value is not None}
            if len(set(known.values())) > 1:
                found |= {(row, column) for row, value in known.items() if value == max(known.values())}
        return found

    def markdown(self) -> str:
        """The table in Markdown, with its title."""
        bold = self.bold()
        headings = " | ".join(map(escape.markdown, self.headings))
        lines = [f"| {headings} |", "|---|" + "---:|" * (len(self.headings) - 1)]
        for i, row in enumerate(self.rows):
            cells = [f"**{cell}**" if (i, j) in bold else escape.markdown(cell) for j, cell in enumerate(row)]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join([f"**{escape.markdown(self.title)}**", "", *lines])

    def csv(self) -> str:
        """The table as CSV, without its title."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([map(escape.csv, row) for row in (self.headings, *self.rows)])
        return text.getvalue()

    def latex(self) -> str:
        """The table as a LaTeX table environment, which needs the package booktabs."""
        bold = self.bold()
        body = []
        for i, row in enumerate(self.rows):
            cells = [rf"\textbf{{{cell}}}" if (i, j) in bold else cell for j, cell in enumerate(map(escape.latex, row))]
            body.append(" & ".join(cells) + r" \\")
            if i + 1 == self.apart:
                body.append(r"\midrule")
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\begin{{tabular}}{{l{'r' * (len(self.headings) - 1)}}}",
                r"\toprule",
                " & ".join(map(escape.latex, self.headings)) + r" \\",
                r"\midrule",
                *body,
                r"\bottomrule",
                r"\end{tabular}",
                rf"\caption{{{escape.latex(self.title)}}}",
                r"\end{table}",
                "",
            ]
        )


def scores(results: Results, question: str) -> list[Table]:
    """One table per budget with policies as rows and tasks as columns, as papers present LongBench.

    The full cache is the first row. If there is only one task, its scores are the columns, as papers present
    LongGenBench.
    """
    columns = results.columns
    made = []
    full = results.full(question)
    fixed = [] if full is None else [full]
    fixed += [c for n, c in results.cells.items() if n.question == question and n.budget is None and c is not full]
    budgets: Sequence[Budget | None] = results.budgets() or [None]
    for budget in budgets:
        own = [c for n, c in results.cells.items() if n.question == question and n.budget == budget is not None]
        if not own and budget is not None:
            continue
        if len(columns) == 1:
            names = tuple(dict.fromkeys(name for cell in [*fixed, *own] for name in cell.scores(columns[0])))
            rows = [[cell.scores(columns[0]).get(name) for name in names] for cell in [*fixed, *own]]
            headings = names
        else:
            rows = [[*map(cell.headline, columns), cell.mean(columns)] for cell in [*fixed, *own]]
            headings = (*_headings(columns), "avg.")
        made.append(
            Table(
                f"scores_{question}{'' if budget is None else f'_{budget}'}",
                f"{results.model}, {budget_text(budget)}, {MEANING[question]}",
                ("policy", *headings),
                tuple((cell.name.policy, *map(percent, row)) for cell, row in zip([*fixed, *own], rows, strict=True)),
                best=tuple(i for i, name in enumerate(headings, 1) if name != "repetition"),  # more of which is worse
                apart=0 if full is None else 1,
            )
        )
    return made


def averages(results: Results, question: str) -> Table:
    """Policies by budgets: the mean of all tasks and its interval."""
    budgets = results.budgets()
    rows = []
    for policy in results.policies:
        cells = {cell.name.budget: cell for cell in results.of(policy, question)}
        rows.append(
            (policy, *(_with_interval(cells.get(b, cells.get(None)), results.columns) for b in budgets or [None]))
        )
    intervals = f"95 % bootstrap intervals where each task has {FEWEST} examples or more"
    return Table(
        f"averages_{question}",
        f"{results.model}: mean of {results.tasks} with {intervals}, {MEANING[question]}",
        ("policy", *map(budget_text, budgets or [None])),
        tuple(rows),
    )


def mean_rows(results: Results) -> list[dict[str, Any]]:
    """One row per cell and task, and plain numbers: what programs read. Scores are in percent, as in all tables.

    The interval is that of `averages`, for one task; `n` is the number of examples that it draws.
    """
    rows = []
    for name, cell in results.cells.items():
        for task, length in results.columns:
            found, examples = interval(cell, ((task, length),)), len(cell.clusters((task, length)))
            if found is not None:
                values = (None if math.isnan(value) else round(100 * value, 6) for value in found)
                rows.append(dict(zip(MEANS, (*name, task, length, *values, examples), strict=True)))
    return rows


def means(results: Results) -> Table:
    """The table of `mean_rows`."""
    rows = (row.values() for row in mean_rows(results))
    return Table("means", "", MEANS, tuple(tuple("" if x is None else f"{x}" for x in row) for row in rows))


def robustness(several: Sequence[Results]) -> list[Table]:
    """The largest compression at a tolerance, and the area under the curve, as in KVCompose's Tables 2 and 3."""
    places = [(results, question) for question in MEANING for results in several if question in results.settings]
    policies = dict.fromkeys(p for results in several for p in results.policies if results.budgets())
    headings = ("policy", *(f"{question}, {results.model}" for results, question in places), "avg.")
    made = []
    for name, title, value in [
        *(
            (
                f"compression_at_{tolerance:.0%}".replace("%", ""),
                f"Largest compression in percent with a loss of at most {tolerance:.0%}",
                lambda r, p, q, t=tolerance: largest_compression(r, p, q, t),
            )
            for tolerance in TOLERANCES
        ),
        (
            "area",
            "Area under the accuracy-compression curve, divided by its width",
            lambda r, p, q: area(curve(r, p, q)) if len(r.of(p, q)) > 1 else None,
        ),
    ]:
        rows = []
        for policy in policies:
            values = [value(results, policy, question) for results, question in places]
            known = [x for x in values if x is not None]
            if known and any(len(results.of(policy, question)) > 1 for results, question in places):
                mean = fmean(known) if len(known) == len(values) else None
                rows.append((policy, *map(percent, [*values, mean])))
        if rows:
            made.append(Table(name, title, headings, tuple(rows), best=tuple(range(1, len(headings)))))
    return made


def comparison(results: Results, question: str, policy: str) -> Table | None:
    """The difference of every other policy to `policy` at the same budget, paired over examples."""
    rows = []
    for name, cell in results.cells.items():
        other = next((c for c in results.of(policy, question) if c.name.budget in (name.budget, None)), None)
        if name.question != question or name.policy == policy or other is None:
            continue
        found = difference(cell, other, results.columns)
        if found is not None:
            few = math.isnan(found.p)
            span = "" if few else f"{percent(found.low)} to {percent(found.high)}"
            rows.append((name.policy, budget_text(name.budget), f"{100 * found.mean:+.1f}", span, p_text(found.p)))
    if not rows:
        return None
    return Table(
        re.sub(r"\W", "_", f"against_{policy}_{question}"),
        f"{results.model}: difference to {policy} in points on the same examples, {MEANING[question]}",
        ("policy", "budget", "difference", "95 % interval", "p"),
        tuple(rows),
    )


def costs(results: Results, question: str) -> Table:
    """The costs of cells: bytes of the cache, tokens per answer, seconds to the first token, decoded tokens per second.

    The bytes are those that a row reserves, also as a share of what the full cache reserves for the same answers.
    The tokens, a mean, are left out if the results are published without them.
    The seconds to the first token are left out if several policies or budgets, or several questions that the policy
    sees, use one prefill.
    """
    full = results.full(question)
    rows = []
    for name, cell in results.cells.items():
        if name.question != question:
            continue
        share = None if full is None else cell.reserved_of(full)
        budgets = len(results.of(name.policy, question))
        first = [
            took["read_seconds"] + took["ask_seconds"] * took["prompts"] / took["answers"]
            for took in cell.timings
            if took.get("shared", budgets) == 1 and (question == "after" or took["answers"] == took["prompts"])
        ]
        speed = decoding_speed(cell.timings)
        tokens = fmean(len(line["tokens"]) for line in cell.lines)
        rows.append(
            (
                name.policy,
                budget_text(name.budget),
                f"{100 * (1 - cell.compression):.1f}",
                f"{fmean(line['kv_bytes_end'] for line in cell.lines) / 1e6:.3g}",
                "" if share is None else f"{share:.3f}",
                f"{tokens:.4g}" if tokens else "",
                f"{np.median(first):.3g}" if first else "",
                f"{speed:.4g}" if speed else "",
            )
        )
    bytes_of = ("kept %", "MB reserved per row", "of full")
    headings = ("policy", "budget", *bytes_of, "tokens per answer", "s to first token", "decoded tokens/s")
    title = f"{results.model}: cache size at the end of an answer, its length, and median times, {MEANING[question]}"
    return Table(f"costs_{question}", title, headings, tuple(rows))


def percent(value: float | None) -> str:
    """A share as text in percent; empty for None."""
    return "" if value is None else f"{100 * value:.1f}"


def p_text(p: float) -> str:
    """A p-value as text; empty for NaN."""
    return "" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"


def budget_text(budget: Budget | None) -> str:
    """A budget as text: a number of entries, or the retained share in percent."""
    if budget is None:
        return "no budget"
    return f"{budget:,} entries" if isinstance(budget, int) else f"{100 * budget:g} % kept"


def _headings(columns: Sequence[Column]) -> list[str]:
    """Tasks without the family if all have the same one, and with their lengths if these differ."""
    families, lengths = {task.split("/")[0] for task, _ in columns}, {length for _, length in columns}
    tasks = [task.split("/", 1)[-1] if len(families) == 1 else task for task, _ in columns]
    sizes = ["" if length is None or len(lengths) == 1 else f" {length:,}" for _, length in columns]
    return [task + size for task, size in zip(tasks, sizes, strict=True)]


def _with_interval(cell: CellResults | None, columns: tuple[Column, ...]) -> str:
    found = None if cell is None else interval(cell, columns)
    if found is None:
        return ""
    ends = "" if math.isnan(found.low) else f" ({percent(found.low)} to {percent(found.high)})"
    return f"{percent(found.mean)}{ends}"

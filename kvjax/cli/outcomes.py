"""Shows what policies answered at several budgets: the table, the picture and the example that `kvjax demo` shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from kvjax.checks import bytes_text, installs
from kvjax.cli.console import numbers_table, show_warning

LONGEST = 48  # the largest number of printed characters of an answer; wrong answers can be long repetitions


@dataclass(frozen=True)
class Outcome:
    """One line of the table: the results of a policy at a budget, which is None for the full cache.

    Attributes:
        kv_bytes: what the cache reserves, for tokens to come too.
        compression: the bytes of the full cache, divided by these.
        tokens_per_second: decoded tokens of all rows per second; None if no token took a step.
    """

    policy: str
    budget: int | None
    correct: list[bool]
    answers: list[str]
    accuracy: float
    kv_bytes: int
    compression: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class Shown:
    """An example as the panel shows it.

    Attributes:
        telling: the sentences of its text that the answer follows from.
        question: its question.
        answer: the expected answer.
    """

    telling: str
    question: str
    answer: str


def draw(path: Path, cells: list[Outcome], title: str) -> Path | None:
    """Draws the picture and returns its path; without matplotlib, prints a warning and returns None."""
    from kvjax.evaluation.picture import accuracy_by_budget

    curves: dict[str, list[tuple[int, float]]] = {}
    for cell in cells:
        if cell.budget is not None:
            curves.setdefault(cell.policy, []).append((cell.budget, cell.accuracy))
    try:
        accuracy_by_budget(path, curves, full=cells[0].accuracy, title=title)
    except ImportError:
        show_warning(f"there is no picture, because matplotlib is not installed: expected {installs('plot')}")
        return None
    return path


def most_telling(cells: list[Outcome]) -> int:
    """The index of the example whose answers differ most: the full cache and about half of the policies are right."""
    full, *others = cells
    rights = [sum(cell.correct[i] for cell in others) for i in range(len(full.correct))]
    return min(range(len(rights)), key=lambda i: (not full.correct[i], abs(2 * rights[i] - len(others))))


def table_of(cells: list[Outcome]) -> Table:
    """A table with a line for each outcome, the full cache first."""
    full = cells[0]
    table = numbers_table(None, "policy", "budget", "correct", "reserved", "smaller", "tokens/s", no_wrap=True)
    for cell in cells:
        colour = "green" if cell.accuracy >= 0.9 * full.accuracy else "red" if cell.accuracy <= 0.5 else "yellow"
        table.add_row(
            cell.policy,
            "all" if cell.budget is None else f"{cell.budget:,}",
            f"[{colour}]{sum(cell.correct)} of {len(cell.correct)}[/]",
            bytes_text(cell.kv_bytes),
            f"{cell.compression:.1f}x",
            "" if cell.tokens_per_second is None else f"{cell.tokens_per_second:,.0f}",
            end_section=cell.budget in (None, cells[-1].budget),  # the smallest budget is the last one of a policy
        )
    return table


def panel_of(index: int, cells: list[Outcome], example: Shown) -> Panel:
    """A panel with one example: its facts, its question and the answer of each policy."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row("the text", f"[dim]...[/] {escape(example.telling)} [dim]...[/]")
    grid.add_row("the question", escape(example.question))
    for cell in cells:
        mark, colour = ("+", "green") if cell.correct[index] else ("-", "red")
        name = cell.policy if cell.budget is None else f"{cell.policy} {cell.budget}"
        grid.add_row(name, f"[{colour}]{mark} {_brief(cell.answers[index])}[/]")
    return Panel(grid, title="One of the questions", title_align="left", expand=False)


def _brief(text: str) -> str:
    line = " ".join(text.split())
    return escape(line if len(line) <= LONGEST else f"{line[: LONGEST - 4]} ...")

"""Finds what was measured of a preset: rows of the tables of results, and of docs/methods/measured.csv."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


@dataclass(frozen=True)
class Table:
    """A table of a page: where it is, what it shows, its header and its rows, whose first cells name a policy."""

    address: str
    caption: str
    lines: tuple[str, ...]

    def of(self, preset: str) -> str:
        """The table with the rows of a preset; empty if it has none."""
        header, rows = self.lines[:2], self.lines[2:]
        found = [row for row in rows if re.match(rf"\| `?{preset}\b(?!:base)", row)]
        return "\n".join([*header, *found]) if found else ""


# Each of these tables has one row or several per policy. The first tables below these headings are meant.
TABLES = (
    ("results/smollm2/question_unknown.md", "## The question unknown"),
    ("results/smollm2/question_seen.md", "## A quarter of the cache"),
    ("results/methods/report.md", "**demo: mean of 7 tasks with 95 % bootstrap intervals, question unknown"),
    ("results/later/report.md", "**demo: mean of 7 tasks with 95 % bootstrap intervals"),
)


@cache
def tables() -> list[Table]:
    """The tables that have results of many presets."""
    return [_table(page, heading) for page, heading in TABLES]


def _table(page: str, heading: str) -> Table:
    text = (DOCS / page).read_text()
    found = re.search(rf"^({re.escape(heading)}.*)\n(?:.*\n)*?((?:\| policy.*\n)(?:\|.*\n)+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"docs/{page} has no table of policies below {heading!r}")
    title, named = text.partition("\n")[0].strip("# "), found[1].strip("#* ")
    lines = tuple(found[2].splitlines())
    if heading.startswith("#"):
        return Table(f"{page}#{named.lower().replace(' ', '-')}", title, lines)
    return Table(page, f"{title}: {named.removeprefix('demo: ')}", lines)


@dataclass(frozen=True)
class Cost:
    """A row of docs/methods/measured.csv: ratios of times, as text; empty where nothing was measured."""

    preset: str
    options: str
    prefill: str
    decode: str


@cache
def costs() -> list[Cost]:
    """Returns what each preset costs."""
    with (DOCS / "methods" / "measured.csv").open(newline="") as file:
        return [Cost(**row) for row in csv.DictReader(file)]

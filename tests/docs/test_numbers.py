"""The tables of results in the documentation have the numbers of the published answers."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest

from kvjax.evaluation.report.results import CellResults, Results, read_results
from kvjax.evaluation.report.statistics import Difference, Interval, difference, interval

DOCS = Path(__file__).parents[2] / "docs"
BOARD, REASONING = DOCS / "results" / "leaderboard", DOCS / "results" / "reasoning"

NAMES = {
    "full cache": "full",
    "defensivekv:level=global": "defensivekv, all layers",
    "defensivekv:level=global,kernel=31": "defensivekv, all layers, wide",
    "dynamickv:kernel=31": "dynamickv, wide",
    "dynamickv:window=32,kernel=31": "dynamickv, wider",
    "kvcrush on snapkv:kernel=31,pool=avg": "kvcrush on snapkv, wide",
    "morphkv:window=64": "morphkv, wide",
    "snapkv:kernel=31,pool=avg": "snapkv, wide",
    "snapkv:kernel=63,pool=avg": "snapkv, wider",
    "snapkv:window=8,kernel=7,pool=avg": "snapkv, as dynamickv",
    "snapkv with kvpress's window and pooling": "snapkv, kvpress",
    "streaming_llm, prompt only": "streaming_llm, kvpress",
    "tova, prompt only": "tova, kvpress",
    "pyramidkv, likewise": "pyramidkv, kvpress",
    "kvzip, which reads the text twice": "kvzip",
    "kvcompose, which reads the text twice": "kvcompose",
    "kvcompose:structured=False, likewise": "kvcompose, per head",
    "rkv:every=16": "rkv, every 16",
    "morphkv:window=32": "morphkv, window 32",
    "keydiff:sinks=4,recent=32,every=16": "keydiff, every 16",
    "morphkv:window=200,fusion=max, the paper's settings": "morphkv, window 200, max",
    "keydiff_codes:budget=960, 8 bits": "keydiff_codes, 8 bits",
    "snapkv:window=32, which evicts at the prompt's end alone": "snapkv, window 32",
}
GROUPS = (
    ("niah_single_1", "niah_single_2", "niah_single_3"),
    ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    ("niah_multivalue", "niah_multiquery"),
    ("vt",),
    ("cwe", "fwe"),
    ("qa_1", "qa_2"),
)
MORE = ("niah_multivalue", "vt", "fwe", "qa_1")  # of the second table with the question seen
SHARES = [(task, share) for task in ("niah_multiquery", "niah_multikey_3") for share in (0.5, 0.25, 0.125)]


def tables_below(page: Path, heading: str) -> list[list[list[str]]]:
    """The tables between a heading and the next one: the cells of each row, without those of the head."""
    text = page.read_text(encoding="utf-8")
    (part,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    found = re.findall(r"(?:^\|.*\n)+", part, re.MULTILINE)
    return [[[x.strip() for x in line.strip("|\n").split("|")] for line in table.splitlines()[2:]] for table in found]


def name_of(cell: str) -> str:
    """The name in a run of a policy in a table."""
    plain = cell.replace("`", "")
    return NAMES.get(plain, plain)


def cell_of(results: Results, policy: str, budget: float) -> CellResults | None:
    """The answers of a policy at a budget, or of one without a budget."""
    found = [cell for name, cell in results.cells.items() if name.policy == policy and name.budget in (budget, None)]
    return found[0] if found else None


def scores_of(results: Results, policy: str, tasks: Sequence[str], budget: float = 0.25) -> str:
    """The mean of tasks and its interval in percent, as the tables write them; nothing if a task was not asked."""
    cell = cell_of(results, policy, budget)
    columns = tuple(column for column in results.columns if column[0].partition("/")[2] in tasks)
    found = None if cell is None else interval(cell, columns)
    return "" if found is None else with_ends(found)


def with_ends(found: Interval | Difference) -> str:
    """A mean and its interval in percent."""
    mean, low, high = (f"{round(100 * x, 6):.0f}" for x in found[:3])
    return mean if low == mean == high else f"{mean} ({low} to {high})"


def megabytes_of(cell: CellResults, shown: str) -> str:
    """What a row reserves, with the decimals of another number."""
    return f"{fmean(line['kv_bytes_end'] for line in cell.lines) / 1e6:.{len(shown.partition('.')[2])}f}"


@pytest.mark.parametrize(
    ("runs", "heading"),
    [(("once", "twice"), "RULER at 4,096 tokens"), (("decoding",), "Presets that evict while decoding")],
)
def test_leaderboard(runs: Sequence[str], heading: str) -> None:
    """The table has the policies that answered all tasks, in the order of their means."""
    (results,) = read_results([BOARD / run for run in runs])
    (rows,) = tables_below(DOCS / "leaderboard.md", heading)
    tasks = [task for group in GROUPS for task in group]
    complete = {name.policy for name, cell in results.cells.items() if cell.mean(results.columns) is not None}
    assert sorted(name_of(row[0]) for row in rows) == sorted(complete)
    ranked = [float(row[1].partition(" ")[0]) for row in rows]
    assert ranked == sorted(ranked, reverse=True)
    for policy, *numbers in rows:
        means = [scores_of(results, name_of(policy), group).partition(" ")[0] for group in GROUPS]
        assert numbers[: 1 + len(GROUPS)] == [scores_of(results, name_of(policy), tasks), *means], policy


@pytest.mark.parametrize(("at", "model"), [(-2, "Llama-3.1-8B-Instruct"), (-1, "Qwen3-8B")])
def test_published_means(at: int, model: str) -> None:
    with (BOARD / "published.csv").open(encoding="utf-8") as file:
        published = [row for row in csv.DictReader(file) if row["model"] == model and row["question"] == "after"]
    means = {row["policy"]: f"{float(row['mean']):.0f}" for row in published if row["removed"] in ("0.0", "0.75")}
    (rows,) = tables_below(DOCS / "leaderboard.md", "RULER at 4,096 tokens")
    for row in rows:
        assert row[at] == means.get(name_of(row[0]), ""), row[0]


def test_a_text_of_its_own_for_each_prompt() -> None:
    (rows,) = tables_below(DOCS / "leaderboard.md", "A text of its own for each prompt")
    essays = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
    shown = set()
    for policies, *numbers in rows:
        for policy in map(name_of, policies.split("; ")):
            shown.add(policy)
            for run, number in zip(("once", "varied"), numbers, strict=True):
                (results,) = read_results([BOARD / run])
                assert scores_of(results, policy, essays) == number, (policy, run)
    assert shown == {name.policy for name in results.cells}


def test_other_shares() -> None:
    (results,) = read_results([BOARD / "once", BOARD / "shares"])
    (rows,) = tables_below(DOCS / "leaderboard.md", "Other shares")
    shown = {policy: dict(zip(SHARES, numbers, strict=True)) for policy, *numbers in rows}
    for policy, numbers in shown.items():
        for (task, budget), number in numbers.items():
            found = scores_of(results, name_of(policy), [task], budget)
            if number or policy != "full cache":
                assert number in (found, found.partition(" ")[0]), (policy, task, budget)


def test_the_question_seen() -> None:
    (results,) = read_results([BOARD / "seen"])
    two, third = tables_below(DOCS / "leaderboard.md", "The question seen")
    for policies, *numbers in two:
        for policy in map(name_of, re.split("; |, (?=`)", policies.partition(", also")[0])):
            for (task, budget), number in zip([share for share in SHARES if share[1] < 0.5], numbers, strict=True):
                if number:
                    assert scores_of(results, policy, [task], budget).partition(" ")[0] == number, (policy, task)
    for shown, *numbers in third:
        policy = name_of(shown)
        shares = (0.25,) if policy == "full" else (0.25, 0.125)
        means = [scores_of(results, policy, MORE, share) for share in shares]
        each = [[scores_of(results, policy, [task], share).partition(" ")[0] for share in shares] for task in MORE]
        assert [number for number in numbers[:2] if number] == means, policy
        assert numbers[2:] == [", ".join(found) for found in each], policy


def test_gsm8k() -> None:
    (results,) = read_results([REASONING / "gsm8k"])
    (rows,) = tables_below(DOCS / "results" / "reasoning.md", "GSM8K")
    full = results.full("before")
    assert full is not None
    for policy, entries, megabytes, solved, against, answered, repetition, _ in rows:
        cell = cell_of(results, name_of(policy), int(entries) if entries.isdecimal() else 0)
        assert cell is not None
        paired = difference(cell, full, results.columns)
        assert paired is not None
        scores = {score: 100 * fmean(line["scores"][score] for line in cell.lines) for score in cell.lines[0]["scores"]}
        assert megabytes == megabytes_of(cell, megabytes)
        assert solved == scores_of(results, cell.name.policy, ["gsm8k"], cell.name.budget or 0)
        assert against == ("" if cell is full else with_ends(paired))
        assert (answered, repetition) == (f"{scores['answered']:.0f}", f"{scores['repetition']:.1f}")
    assert len(rows) == len(results.cells)


def test_competition_problems() -> None:
    (results,) = read_results([REASONING / "competition"])
    (cell,) = results.cells.values()
    (rows,) = tables_below(DOCS / "results" / "reasoning.md", "MATH-500 and AIME24")
    for name, solved, *others, _ in rows:
        task = name.lower().replace("-", "")
        scores = [line["scores"] for line in cell.lines if line["task"] == f"math/{task}"]
        assert solved == scores_of(results, "full", [task])
        assert others == [f"{100 * fmean(x[score] for x in scores):.0f}" for score in ("answered", "repetition")]
    assert len(rows) == len(results.columns)


def test_longgenbench() -> None:
    (results,) = read_results([REASONING / "longgenbench"])
    (rows,) = tables_below(DOCS / "results" / "reasoning.md", "LongGenBench")
    for policy, megabytes, completed, _ in rows:  # repetition is counted in the texts, which are not published
        cell = cell_of(results, name_of(policy), 512)
        assert cell is not None
        assert completed == f"{100 * (cell.mean(results.columns) or 0):.1f}"
        assert megabytes == megabytes_of(cell, megabytes)
    assert len(rows) == len(results.cells)

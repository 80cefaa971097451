"""`kvjax demo`: the model that ships with kvjax answers questions about long texts under six policies."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from kvjax.cli.console import bytes_text, keep_compiled, print_json, show_warning, working
from kvjax.cli.progress import Bar

if TYPE_CHECKING:
    from kvjax.evaluation.tasks.demo import DemoExample

COMPRESSING = ("streaming_llm", "h2o", "tova", "snapkv", "morphkv")
SHARES, LEAST = (4, 8, 16), 48  # the default budgets are the length divided by these numbers, and not less than LEAST
LONGEST = 48  # the largest number of printed characters of an answer; wrong answers can be long repetitions


@dataclass(frozen=True)
class Outcome:
    """One line of the table: the results of a policy at a budget, which is None for the full cache."""

    policy: str
    budget: int | None
    correct: list[bool]
    answers: list[str]
    accuracy: float
    kv_bytes: int
    compression: float
    tokens_per_second: float


def demo(
    length: Annotated[int, typer.Option(min=256, max=2048, help="Tokens per prompt, including its question.")] = 2048,
    examples: Annotated[int, typer.Option(min=1, max=1024, help="Number of prompts, which run as one batch.")] = 7,
    budget: Annotated[
        list[int] | None,
        typer.Option(
            help="Entries per kv head; may be repeated. Default: 1/4, 1/8, 1/16 of the length, each at least 48."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random texts.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the picture.")] = Path("demo_output"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Answer questions about long texts with the model that ships with kvjax, under six cache policies."""
    import numpy as np

    import kvjax
    from kvjax.evaluation.answers import answer
    from kvjax.evaluation.tasks import demo as tasks
    from kvjax.evaluation.tasks.vocabulary import decode

    started = time.perf_counter()
    budgets = sorted(set(budget or [max(length // share, LEAST) for share in SHARES]), reverse=True)
    policies: dict[tuple[str, int | None], kvjax.Policy] = {("full", None): kvjax.policies.full()}
    policies |= {
        (name, size): kvjax.policies.parse(f"{name}:budget={size}") for name in COMPRESSING for size in budgets
    }
    out.mkdir(parents=True, exist_ok=True)
    keep_compiled()
    with working("loading the demo model", quiet=as_json):
        params, tokenizer = kvjax.load(Path(kvjax.__file__).parent / "demo_model")
    assert tokenizer is not None
    rng = np.random.default_rng(seed)
    names = list(tasks.TASKS)
    drawn_of = [names[i % len(names)] for i in range(examples)]
    drawn = [tasks.example(name, length, rng) for name in drawn_of]
    cells = []
    with Bar("policies") as bar:
        bar.begin(len(policies))
        for (name, size), policy in policies.items():
            bar.at(name if size is None else f"{name} with {size} entries per head")
            result = answer(params, drawn, policy, end_token=tokenizer.eos_token_id)
            cells.append(
                Outcome(
                    name,
                    size,
                    correct=result.correct.tolist(),
                    answers=[decode(ids) for ids in result.answers],
                    accuracy=result.accuracy,
                    kv_bytes=result.stats.cache_bytes,
                    compression=result.stats.compression_ratio,
                    tokens_per_second=result.stats.decode_tokens_per_second,
                )
            )
            bar.advance()
    picture = _draw(out / "accuracy_by_budget.png", cells, f"{examples} questions about texts of {length:,} tokens")
    index = _most_telling(cells)
    document: dict[str, Any] = {
        "length": length,
        "examples": examples,
        "seed": seed,
        "tasks": drawn_of,
        "cells": [asdict(cell) for cell in cells],
        "example": {"index": index, "question": decode(drawn[index].question), "answer": decode(drawn[index].answer)},
        "picture": None if picture is None else str(picture),
        "seconds": time.perf_counter() - started,
    }
    if as_json:
        print_json(document)
    else:
        _show(document, cells, drawn[index])


def _draw(path: Path, cells: list[Outcome], title: str) -> Path | None:
    """Draws the picture and returns its path; without matplotlib, prints a warning and returns None."""
    from kvjax.evaluation.picture import accuracy_by_budget

    curves: dict[str, list[tuple[int, float]]] = {}
    for cell in cells:
        if cell.budget is not None:
            curves.setdefault(cell.policy, []).append((cell.budget, cell.accuracy))
    try:
        accuracy_by_budget(path, curves, full=cells[0].accuracy, title=title)
    except ImportError:
        show_warning('there is no picture, because matplotlib is not installed; pip install "kvjax[plot]" installs it')
        return None
    return path


def _most_telling(cells: list[Outcome]) -> int:
    """The index of the example whose answers differ most: the full cache and about half of the policies are right."""
    full, *others = cells
    rights = [sum(cell.correct[i] for cell in others) for i in range(len(full.correct))]
    return min(range(len(rights)), key=lambda i: (not full.correct[i], abs(2 * rights[i] - len(others))))


def _show(document: dict[str, Any], cells: list[Outcome], example: DemoExample) -> None:
    console = Console(highlight=False)
    full = cells[0]
    console.print(
        f"Each of {document['examples']} prompts is a text of {document['length']:,} tokens that ends in a question.\n"
        "The policies therefore see the question when they compress. An answer must match exactly.",
    )
    table = Table()
    table.add_column("policy")
    for name in ("budget", "correct", "KV bytes", "smaller", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell in cells:
        colour = "green" if cell.accuracy >= 0.9 * full.accuracy else "red" if cell.accuracy <= 0.5 else "yellow"
        table.add_row(
            cell.policy,
            "all" if cell.budget is None else f"{cell.budget:,}",
            f"[{colour}]{sum(cell.correct)} of {len(cell.correct)}[/]",
            bytes_text(cell.kv_bytes),
            f"{cell.compression:.1f}x",
            f"{cell.tokens_per_second:,.0f}",
            end_section=cell.budget in (None, cells[-1].budget),  # the smallest budget is the last one of a policy
        )
    console.print(table)
    console.print(_answered(document["example"]["index"], cells, example))
    if document["picture"]:
        console.print(f"Accuracy against budget: {document['picture']}", soft_wrap=True, markup=False)
    console.print(f"[dim]total time {document['seconds']:.0f} s, including compilation[/dim]")


def _answered(index: int, cells: list[Outcome], example: DemoExample) -> Panel:
    """A panel with one example: its facts, its question and the answer of each policy."""
    from kvjax.evaluation.tasks.vocabulary import FUNCTION, decode

    def brief(text: str) -> str:
        return escape(text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ...")

    answer, question = decode(example.answer), decode(example.question)
    asked = set(f"{question} {answer}".split()) - set(FUNCTION)
    sentences = [sentence.strip() for sentence in decode(example.context).split(".")]
    telling = [f"{sentence}." for sentence in sentences if asked & set(sentence.split())]
    some = telling if len(telling) <= 6 else [*telling[:5], f"({len(telling) - 5} more)"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    grid.add_row("the text", f"[dim]...[/] {escape(' ... '.join(some))} [dim]...[/]")
    grid.add_row("the question", escape(question))
    for cell in cells:
        mark, colour = ("+", "green") if cell.correct[index] else ("-", "red")
        name = cell.policy if cell.budget is None else f"{cell.policy} {cell.budget}"
        grid.add_row(name, f"[{colour}]{mark} {brief(cell.answers[index])}[/]")
    return Panel(grid, title="One of the questions", title_align="left", expand=False)

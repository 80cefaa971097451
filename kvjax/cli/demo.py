"""`kvjax demo`: the model that ships with kvjax, or another, answers questions about long texts under six policies."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvjax.cli.console import print_json
from kvjax.cli.needles import answer_needles
from kvjax.cli.options import AsJson
from kvjax.cli.outcomes import Outcome, Shown, draw, most_telling, panel_of, table_of
from kvjax.cli.progress import Bar, Line
from kvjax.runtime.compiled import keep_compiled

if TYPE_CHECKING:
    from kvjax.evaluation.tasks.demo import DemoExample

COMPRESSING = ("streaming_llm", "h2o", "tova", "snapkv", "morphkv")
SHARES, LEAST = (4, 8, 16), 48  # the default budgets are the length divided by these numbers, and not less than LEAST
LONGEST = 2048  # tokens that the model that ships with kvjax was trained for


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder, GGUF file or hub repository. Default: the model that ships with kvjax."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with essays.txt or PaulGrahamEssays/, which --model reads.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(min=256, help="Tokens per prompt, including its question. Default: 2048; 1024 with --model."),
    ] = None,
    examples: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Number of prompts, which run as one batch. Default: 7; 8 with --model."),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(
            help="Entries per kv head; may be repeated. Default: 1/4, 1/8, 1/16 of the length, each at least 48; "
            "1/4 and 1/8 with --model."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random texts.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the picture, and of the answers of --model.")] = Path(
        "demo_output"
    ),
    as_json: AsJson = False,
) -> None:
    """Answer questions about long texts under six cache policies, with the model that ships with kvjax or another."""
    from kvjax.files.writing import check_folder
    from kvjax.policies import parse

    started = time.perf_counter()
    if (model is None) != (data is None):
        raise ValueError("--model and --data: expected both or neither, because another model reads essays from DATA")
    length = length or (LONGEST if model is None else 1024)
    examples = examples or (7 if model is None else 8)
    if model is None and length > LONGEST:
        raise ValueError(f"--length {length}: expected at most {LONGEST}, which the model that ships with kvjax knows")
    shares = SHARES if model is None else SHARES[:2]
    budgets = sorted(set(budget or [max(length // share, LEAST) for share in shares]), reverse=True)
    for name in COMPRESSING:
        for size in budgets:
            parse(f"{name}:budget={size}")
    check_folder(out, overwrite=True)
    out.mkdir(parents=True, exist_ok=True)
    keep_compiled()
    if model is None or data is None:
        title = f"{examples} questions about texts of {length:,} tokens"
        cells, shown, tasks = _with_demo_model(length, examples, budgets, seed)
    else:
        title = f"{examples} needles in essays of {length:,} tokens"
        cells, shown, tasks = answer_needles(model, data, COMPRESSING, length, examples, budgets, seed, out / "answers")
    picture = draw(out / "accuracy_by_budget.png", cells, title)
    index = most_telling(cells)
    document: dict[str, Any] = {
        "model": model,
        "length": length,
        "examples": examples,
        "seed": seed,
        "tasks": tasks,
        "cells": [asdict(cell) for cell in cells],
        "example": {"index": index, "question": shown[index].question, "answer": shown[index].answer},
        "picture": None if picture is None else str(picture),
        "seconds": time.perf_counter() - started,
    }
    if as_json:
        print_json(document)
    else:
        _show(document, cells, shown[index])


def _with_demo_model(
    length: int, examples: int, budgets: list[int], seed: int
) -> tuple[list[Outcome], list[Shown], list[str]]:
    """The outcomes of the model that ships with kvjax, its examples, and the task of each example."""
    import numpy as np

    import kvjax
    from kvjax.checkpoint.folder import DEMO
    from kvjax.evaluation.answers import answer
    from kvjax.evaluation.tasks import demo as tasks
    from kvjax.evaluation.tasks.vocabulary import decode

    policies: dict[tuple[str, int | None], kvjax.Policy] = {("full", None): kvjax.policies.full()}
    policies |= {
        (name, size): kvjax.policies.parse(f"{name}:budget={size}") for name in COMPRESSING for size in budgets
    }
    with Line("loading the demo model"):
        params, tokenizer = kvjax.load(DEMO)
    assert tokenizer is not None
    rng = np.random.default_rng(seed)
    names = list(tasks.TASKS)
    drawn_of = [names[i % len(names)] for i in range(examples)]
    drawn = [tasks.example(name, length, rng) for name in drawn_of]
    cells: list[Outcome] = []
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
                    compression=(cells[0].kv_bytes if cells else result.stats.cache_bytes) / result.stats.cache_bytes,
                    tokens_per_second=result.stats.decode_tokens_per_second,
                )
            )
            bar.advance()
    return cells, [_shown(example) for example in drawn], drawn_of


def _shown(example: DemoExample) -> Shown:
    """The example with the sentences that hold words of its question and its answer."""
    from kvjax.evaluation.tasks.vocabulary import FUNCTION, decode

    answer, question = decode(example.answer), decode(example.question)
    asked = set(f"{question} {answer}".split()) - set(FUNCTION)
    sentences = [sentence.strip() for sentence in decode(example.context).split(".")]
    telling = [f"{sentence}." for sentence in sentences if asked & set(sentence.split())]
    some = telling if len(telling) <= 6 else [*telling[:5], f"({len(telling) - 5} more)"]
    return Shown(" ... ".join(some), question, answer)


def _show(document: dict[str, Any], cells: list[Outcome], example: Shown) -> None:
    console = Console(highlight=False)
    marked = "An answer must match exactly." if document["model"] is None else "An answer must contain the value."
    console.print(
        f"Each of {document['examples']} prompts is a text of {document['length']:,} tokens that ends in a question.\n"
        f"The policies therefore see the question when they compress. {marked}",
    )
    console.print(table_of(cells))
    console.print(panel_of(document["example"]["index"], cells, example))
    if document["picture"]:
        console.print(f"Accuracy against budget: {document['picture']}", soft_wrap=True, markup=False)
    console.print(f"[dim]total time {document['seconds']:.0f} s, including compilation[/dim]")

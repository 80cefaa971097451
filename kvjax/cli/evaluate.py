"""`kvjax eval`: runs the tasks of a YAML grid under its policies and budgets and writes a folder of results."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from kvjax.checks import bytes_text, shown
from kvjax.cli.console import numbers_table, print_json, show_warning, stderr
from kvjax.cli.options import AsJson, Chat, Position, Scorer
from kvjax.cli.progress import Bar, Line
from kvjax.runtime.compiled import keep_compiled

if TYPE_CHECKING:
    from kvjax.evaluation.asking import Asker
    from kvjax.evaluation.planning import RunPlan
    from kvjax.evaluation.runner import Summary

INCOMPLETE = 1  # the exit status of a run with errors
SHOWN = 10  # the largest number of errors in the summary; the results file has all of them

SMALL: dict[str, Any] = {
    "title": "Six policies",
    "tasks": [{"name": "demo/*", "lengths": [512]}],
    "limit": 4,
    "policies": [
        "full",
        "streaming_llm:budget={budget}",
        "h2o:budget={budget}",
        "tova:budget={budget}",
        "snapkv:budget={budget}",
        "morphkv:budget={budget}",
    ],
    "budgets": [0.25, 0.1],
    "question": "both",
}


def evaluate(
    grid_file: Annotated[
        Path | None,
        typer.Option("--config", help="YAML file of the grid. Default: a small grid on the demo model."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the results. An interrupted run continues there.")] = Path(
        "eval_output"
    ),
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder, GGUF file or hub repository; replaces the grid's.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data files; replaces the grid's.")] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only these: tasks of the grid, such as ruler/*, or files of questions, *.jsonl; may be repeated."
        ),
    ] = None,
    scorer: Scorer = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Largest number of tokens per answer, for all tasks.")
    ] = None,
    question: Position = None,
    chat: Chat = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Largest number of examples per task and length.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Largest number of prompts per batch.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(metavar="DATAxMODEL", help="Device mesh for rows x heads, such as 2x4."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS|local",
            help="Divide the work over a Ray cluster: HOST:PORT of its head, auto, or local for this machine.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --ray: most workers. Default: one per group of accelerators, or one per machine without any.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the tasks, batches and memory.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run tasks under cache policies and record every answer. `kvjax report` makes tables and plots of the results."""
    from kvjax.checkpoint import mesh_sizes
    from kvjax.evaluation.entries import LINES
    from kvjax.evaluation.grid import Grid
    from kvjax.evaluation.model import plan_run
    from kvjax.evaluation.records import RESULTS
    from kvjax.files.writing import check_folder

    if not dry_run:
        check_folder(out, overwrite=True)
    if workers is not None and ray is None:
        raise ValueError(f"--workers {workers} without --ray: expected both")
    grid = Grid.of(SMALL) if grid_file is None else Grid.read(grid_file)
    grid = grid.but(
        model=model,
        data=None if data is None else str(data),
        batch=batch,
        mesh=None if mesh is None else mesh_sizes(mesh),
        new_tokens=max_new_tokens,
        question=question,
        chat=chat or None,
    )
    files = [name for name in tasks or () if name.endswith(LINES)]
    if scorer is not None and not files:
        raise ValueError(f"--scorer {shown(scorer)} without a file: expected --tasks FILE.jsonl")
    grid = grid.with_files(files, scorer)
    if limit is not None:
        grid = grid.limited(limit)
    keep_compiled()
    with Line(f"reading {grid.model} and its tasks"):
        plan = plan_run(grid, tasks)
    if dry_run:
        print_json(plan_document(plan)) if as_json else show_plan(plan)
        raise typer.Exit(INCOMPLETE if plan.errors() else 0)
    for text in refused(plan):
        show_warning(text)
    summary = run_here(plan, out) if ray is None else _on_ray(plan, out, ray, workers)
    if as_json:
        print_json({"results": str(out / RESULTS)} | asdict(summary))
        raise typer.Exit(INCOMPLETE if summary.errors else 0)
    stderr().print(
        f"{summary.answers:,} of {summary.planned:,} answers are in {escape(str(out / RESULTS))}, "
        f"{summary.new:,} of them new",
        soft_wrap=True,
    )
    if summary.errors:
        show_errors(summary)
        raise typer.Exit(INCOMPLETE)


def show_errors(summary: Summary) -> None:
    """Prints the errors of a run, or the first ones."""
    stderr().print(f"[red]{len(summary.errors):,} errors:[/]")
    for text in summary.errors[:SHOWN]:
        stderr().print(f"  {escape(text)}", soft_wrap=True)
    if len(summary.errors) > SHOWN:
        stderr().print(f"  ... and {len(summary.errors) - SHOWN:,} more, which the results file lists")


def refused(plan: RunPlan) -> list[str]:
    """Lists what of a plan cannot be asked, for the user to see before the model is loaded."""
    from kvjax.evaluation.planning import sentence

    errors = [f"not asked: {sentence(line)}" for line in plan.errors()]
    more = len(errors) - SHOWN
    return [*errors[:SHOWN], *([f"not asked: {more:,} more, which --dry-run lists"] if more > 0 else [])]


def run_here(plan: RunPlan, out: Path) -> Summary:
    """Runs a plan in this process."""
    from kvjax.evaluation.runner import run
    from kvjax.evaluation.worker import load_asker

    def load() -> Asker:
        bar.at(f"loading {plan.grid.model}")
        asker = load_asker(plan)
        bar.at("reading the first prompts")
        return asker

    with Watching("answers") as bar:
        return run(plan, load, out, bar)


def _on_ray(plan: RunPlan, out: Path, address: str, workers: int | None) -> Summary:
    """Runs a plan on a Ray cluster."""
    import jax

    from kvjax.evaluation.cluster import answer, connected
    from kvjax.evaluation.runner import record

    jax.config.update("jax_platforms", "cpu")  # the workers have the accelerators
    with connected(address) as module, Watching("answers") as bar:
        return record(plan, partial(answer, module, plan, workers=workers), out, bar)


class Watching(Bar):
    """The progress of a run."""

    def cell(self, cell: Any) -> None:
        from kvjax.evaluation.planning import name_of

        self.at(f"{name_of(cell)}, question {cell.question}")


def plan_document(plan: RunPlan) -> dict[str, Any]:
    """Returns what `show_plan` prints. A policy that cannot be asked has no batches, and an error."""
    from kvjax.evaluation.planning import sentence

    counts = Counter((item.task.name, item.length) for item in plan.items)
    return {
        "model": plan.grid.model,
        "tasks": [{"task": task, "length": length, "examples": n} for (task, length), n in counts.items()],
        "policies": [
            {
                "policy": planned.cell.label,
                "budget": planned.cell.budget,
                "question": planned.cell.question,
                "batches": len(planned.batches),
                "error": planned.error,
            }
            for planned in plan.cells
        ],
        "errors": [sentence(line) for line in plan.errors()],
    }


def show_plan(plan: RunPlan) -> None:
    """Prints a plan: the tasks with the lengths of their prompts, then the policies with their batches and memory."""
    from kvjax.evaluation.planning import sentence

    console = Console(highlight=False)
    table = numbers_table("Tasks", "task", "length", "examples", "questions", "prompt tokens", "answer", "cut")
    groups: dict[tuple[str, int | None], list[Any]] = {}
    for item in plan.items:
        groups.setdefault((item.task.name, item.length), []).append(item)
    for (task, length), items in groups.items():
        sizes = sorted(item.context.size + q.size for item in items for q in item.questions)
        table.add_row(
            task,
            "" if length is None else f"{length:,}",
            f"{len(items):,}",
            f"{len(sizes):,}",
            f"{sizes[0]:,} - {sizes[len(sizes) // 2]:,} - {sizes[-1]:,}",
            f"{items[0].new_tokens:,}",
            f"{sum(item.cut > 0 for item in items):,}",
        )
    console.print(table, "prompt tokens: minimum, median, maximum", sep="\n")
    columns = ("budget", "question", "batches", "prompts each", "caches of one", "prefill")
    table = numbers_table("Policies", "policy", *columns)
    total, shared = 0, {cell: i for i, sweep in enumerate(plan.sweeps, 1) for cell in sweep.cells}
    for planned in plan.cells:
        cell, asked = planned.cell, planned.batches
        name, budget = escape(cell.label), "" if cell.budget is None else f"{cell.budget:,}"
        if planned.error is not None:
            table.add_row(name, budget, cell.question, "[red]none[/]", "", "", "")
            continue
        total += sum(len(reading.asks) for batch in asked for reading in batch.readings)
        rows = sorted({batch.rows for batch in asked})
        most = bytes_text(max((plan.batch_bytes(batch, [cell.build()]) for batch in asked), default=0))
        each = "-".join(map(str, dict.fromkeys((rows[0], rows[-1])))) if rows else ""
        table.add_row(name, budget, cell.question, f"{len(asked):,}", each, most, str(shared.get(cell, "")))
    console.print(table, f"{total:,} answers in total", sep="\n")
    table = numbers_table("Prefills", "prefill", "policies and budgets", "question", "batches", "caches of one")
    for i, sweep in enumerate(plan.sweeps, 1):
        policies = [cell.build() for cell in sweep.cells]
        most = bytes_text(max(plan.batch_bytes(batch, policies) for batch in sweep.batches))
        table.add_row(str(i), f"{len(policies):,}", sweep.cells[0].question, f"{len(sweep.batches):,}", most)
    console.print(table, "each prefill serves several policies and budgets, whose caches are held at once", sep="\n")
    for line in plan.errors():
        console.print(f"[red]not asked[/]: {escape(sentence(line))}", soft_wrap=True)

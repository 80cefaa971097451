"""`kvjax compare`: which policy to use, from questions that the user has: scores, memory and speed in one table."""

from __future__ import annotations

import math
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvjax.checks import bytes_text, counted, installs, shown
from kvjax.cli.console import note, print_json, show_warning
from kvjax.cli.evaluate import INCOMPLETE, refused, run_here, show_errors
from kvjax.cli.options import AsJson, Chat, Chunk, Dtype, Gates, Mesh, Model, Position, Scorer
from kvjax.cli.progress import Line
from kvjax.runtime.compiled import keep_compiled

if TYPE_CHECKING:
    from kvjax.evaluation.planning import RunPlan
    from kvjax.evaluation.report.compared import Compared
    from kvjax.evaluation.report.statistics import Difference, Interval


def compare(
    model: Model,
    policy: Annotated[
        list[str], typer.Option(help="A policy, PRESET or PRESET:OPTION=VALUE,...; repeat it for others.")
    ],
    tasks: Annotated[
        list[str],
        typer.Option(help="A file of questions, *.jsonl, or a task such as longbench/qasper; may be repeated."),
    ],
    against: Annotated[str, typer.Option(help="The policy that the others are compared with.")] = "full",
    scorer: Scorer = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Largest number of tokens per answer.")] = None,
    question: Position = None,
    chat: Chat = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Largest number of texts per task.")] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="Tokens of the prompts of generated tasks, such as ruler/*.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the benchmarks' data files.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Largest number of prompts per batch.")] = None,
    chunk: Chunk = None,
    mesh: Mesh = "1x1",
    dtype: Dtype = None,
    gates: Gates = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep the answers in this folder, where an interrupted run continues.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw scores against memory: a file *.png, *.pdf or *.svg.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the picture.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare policies on your questions: score, difference to the full cache, memory and speed."""
    from kvjax.checkpoint import mesh_sizes
    from kvjax.evaluation.entries import LINES
    from kvjax.evaluation.grid import Grid
    from kvjax.evaluation.model import plan_run
    from kvjax.evaluation.report.compared import answers_to, compared
    from kvjax.evaluation.report.results import read_results
    from kvjax.files.writing import check_folder

    if out is not None:
        check_folder(out, overwrite=True)
    if picture is not None:
        _check_picture(picture, overwrite)
    files = [name for name in tasks if name.endswith(LINES)]
    if scorer is not None and not files:
        raise ValueError(f"--scorer {shown(scorer)} without a file: expected --tasks FILE.jsonl")
    if length and len(files) == len(tasks):
        raise ValueError(f"--length {length[0]} with files of questions only: expected a generated task too")
    policies = list(dict.fromkeys([against, *policy]))
    given: dict[str, Any] = {
        "title": f"{len(policies)} policies",
        "model": model,
        "tasks": [
            {"file": name, "scorer": scorer} if name in files else {"name": name, "lengths": length} for name in tasks
        ],
        "policies": [{"policy": text, "name": text} for text in policies],
        "question": question,
        "new_tokens": max_new_tokens,
        "chat": chat,
        "limit": limit,
        "data": None if data is None else str(data),
        "batch": batch,
        "chunk": chunk,
        "mesh": mesh_sizes(mesh),
        "dtype": dtype,
        "gates": gates,
    }
    keep_compiled()
    with Line(f"reading {model} and its tasks"):
        plan = plan_run(Grid.of(given))
    for text in refused(plan):
        show_warning(text)
    if not plan.items:
        raise ValueError("there is no question to ask: expected a task with at least one")
    with tempfile.TemporaryDirectory(prefix="kvjax-") if out is None else nullcontext(out) as folder:
        summary = run_here(plan, Path(folder))
        if summary.errors and not summary.answers:
            raise ValueError(f"no question was answered: {summary.errors[0]}")
        if summary.errors:
            show_errors(summary)
        (results,) = read_results([folder])
    results = answers_to(results, plan.items, policies)
    found = {setting: compared(results, setting, against) for setting in plan.grid.question}
    if picture is not None:
        _draw(picture, found, score_name(plan))
    if as_json:
        print_json(_document(plan, found, against, out, picture))
    else:
        for setting, rows in found.items():
            _show(plan, setting, rows, against)
        if picture is not None:
            note(f"the picture is {picture}")
        if out is not None:
            note(f"the answers are in {out}; kvjax report {out} --csv FILE writes one row for each")
    if summary.errors:
        raise typer.Exit(INCOMPLETE)


def _check_picture(path: Path, overwrite: bool) -> None:
    """Raises ValueError unless a picture can be drawn there, which is known before the run."""
    from kvjax.evaluation.picture import PICTURES, new_figure
    from kvjax.files.writing import check_file

    if path.suffix not in PICTURES:
        raise ValueError(f"--picture {path}: expected a file *.png, *.pdf or *.svg")
    check_file(path, overwrite, "--overwrite")
    try:
        new_figure(1, 1, 1)
    except ImportError:
        raise ValueError(f"--picture needs matplotlib, which is not installed: expected {installs('plot')}") from None


def score_name(plan: RunPlan) -> str:
    """The name of the score of all tasks; "score" if they have different ones."""
    names = {item.task.fixed.get("scorer", "score") for item in plan.items}
    return names.pop() if len(names) == 1 else "score"


def _draw(path: Path, found: dict[Any, list[Compared]], score: str) -> None:
    from kvjax.evaluation.picture import Place, accuracy_by_memory
    from kvjax.evaluation.report import escape
    from kvjax.evaluation.report.tables import MEANING

    panels = {
        MEANING[setting]: [Place(escape.plot(row.policy), row.cache_bytes, *row.score) for row in rows]
        for setting, rows in found.items()
    }
    accuracy_by_memory(path, panels, score=score)


def _show(plan: RunPlan, setting: str, rows: list[Compared], against: str) -> None:
    """Prints the table of a setting, which fits 80 columns, and a sentence for each policy."""
    from kvjax.evaluation.report.compared import LEAST_TOKENS
    from kvjax.evaluation.report.tables import MEANING, p_text

    console = Console(highlight=False)
    questions, texts = _counts(plan)
    title = f"{counted(questions, 'question')} about {counted(texts, 'text')}, {MEANING[setting]}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", overflow="fold", min_width=12)
    for name in (f"{score_name(plan)[:12]}, %", f"to {against}"[:16], "cache", "tokens/s"):
        table.add_column(escape(name), justify="right", no_wrap=True)
    for row in rows:
        change = ""
        if row.difference is not None:
            p = p_text(row.difference.p).replace("< ", "<")
            change = _with_ends(row.difference, "+.1f", f", p{'' if p[:1] == '<' else ' '}{p}" if p else "")
        speed = "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
        name = escape(row.policy).replace(":", "\n  ", 1)  # the options stand beside the intervals
        table.add_row(name, _with_ends(row.score, ".1f"), change, bytes_text(row.cache_bytes), speed)
    console.print(table)
    for row in rows[1:]:
        console.print(row.sentence(against), markup=False)
    if any(row.tokens_per_second is None for row in rows):
        console.print(f"tokens/s: stated where a policy decoded {LEAST_TOKENS} tokens or more", markup=False)


def _counts(plan: RunPlan) -> tuple[int, int]:
    """The numbers of questions and of texts that they are about."""
    return sum(len(item.questions) for item in plan.items), len({item.example.context for item in plan.items})


def _with_ends(found: Interval | Difference, form: str, beside: str = "") -> str:
    """A mean in percent with what is beside it, above the ends of its interval if there is one."""
    ends = "" if math.isnan(found.low) else f"\n{100 * found.low:{form}} to {100 * found.high:{form}}"
    return f"{100 * found.mean:{form}}{beside}{ends}"


def _document(
    plan: RunPlan, found: dict[Any, list[Compared]], against: str, out: Path | None, picture: Path | None
) -> dict[str, Any]:
    from kvjax.evaluation.report.statistics import Difference, Interval

    def plain(value: Any) -> Any:
        if isinstance(value, Interval | Difference):
            return {name: plain(one) for name, one in value._asdict().items()}
        return None if isinstance(value, float) and math.isnan(value) else value

    rows = [row for some in found.values() for row in some]
    questions, texts = _counts(plan)
    return {
        "model": plan.grid.model,
        "tasks": sorted({item.task.name for item in plan.items}),
        "texts": texts,
        "questions": questions,
        "score": score_name(plan),
        "against": against,
        "policies": [
            {name: plain(value) for name, value in vars(row).items()} | {"sentence": row.sentence(against) or None}
            for row in rows
        ],
        "out": None if out is None else str(out),
        "picture": None if picture is None else str(picture),
    }

"""Copies the results of a run without the texts of others, so that they may be published, and small.

    python -m benchmarks.publish_run runs/ruler docs/results/ruler

`kvjax report` reads the copy as it reads the run. What it leaves out are the questions, references and answers of tasks
whose prompts may not be shown, and the tokens of all answers. Paths of the home folder begin with ~.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.evaluation.header import PROMPTS, read_header
from kvjax.evaluation.lines import Line, encoded, read_answer, read_lines
from kvjax.evaluation.records import RESULTS, TIMINGS
from kvjax.evaluation.tasks import registry
from kvjax.files.home import from_home
from kvjax.files.writing import new_file, write_file

TEXTS = ("question_text", "answers", "prediction")


def published(line: Line) -> Line:
    """Returns a line of results without what may not, or need not, be published."""
    task = registry.TASKS.get(line["task"])
    hidden = () if task is not None and task.shown else TEXTS
    return {name: x for name, x in line.items() if name not in hidden} | ({"tokens": []} if "tokens" in line else {})


def from_home_on(value: Any) -> Any:
    """Returns a value of JSON with ~ for the home folder in its texts."""
    if isinstance(value, dict):
        return {name: from_home_on(x) for name, x in value.items()}
    if isinstance(value, list):
        return [from_home_on(x) for x in value]
    return from_home(value) if isinstance(value, str) else value


def main(
    run: Annotated[Path, typer.Argument(help="A folder that kvjax eval wrote.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; files in it are replaced.")],
) -> None:
    header = from_home_on(read_header(run))
    lines = [encoded(published(line)) for line in read_lines(run / RESULTS, read_answer)]
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "run.json", json.dumps(header, indent=2, ensure_ascii=False) + "\n")
    unchanged = {name: (run / name).read_bytes() for name in (TIMINGS, PROMPTS) if (run / name).exists()}
    for name, content in {RESULTS: b"".join(lines), **unchanged}.items():
        with new_file(out / f"{name}.gz") as new:
            new.write_bytes(gzip.compress(content, mtime=0))
    typer.echo(f"{len(lines):,} answers are in {out}")


if __name__ == "__main__":
    typer.run(main)

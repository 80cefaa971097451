"""Copies the results of a run without the texts of others, so that they may be published, and small.

    python -m benchmarks.publish_run runs/ruler docs/results/ruler

`kvjax report` reads the copy as it reads the run. What it leaves out are the prompts, questions, references and answers
of tasks whose prompts may not be shown, and of files of your own; and the tokens of all answers. Paths of the home
folder begin with ~.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated

import typer

from kvjax.checks import is_number
from kvjax.evaluation.header import PROMPTS, read_header, read_prompts
from kvjax.evaluation.lines import Line, encoded, read_answer, read_lines, read_timing
from kvjax.evaluation.records import RESULTS, TIMINGS
from kvjax.evaluation.tasks import registry
from kvjax.files.home import without_home
from kvjax.files.writing import new_file, write_file

TEXTS = ("question_text", "answers", "prediction")


def published(line: Line) -> Line:
    """Returns a line of results without what may not, or need not, be published."""
    kept = {name: x for name, x in line.items() if _shown(line["task"]) or name not in TEXTS}
    if "tokens" in line:
        kept["tokens"] = []
    if "meta" in line and not _shown(line["task"]):
        kept["meta"] = {name: x for name, x in line["meta"].items() if is_number(x)}  # others are of the prompt
    return without_home(kept)


def _shown(task: str | None) -> bool:
    """Returns whether the texts of a task may be published. Those of its user's own files may not."""
    return task is not None and (known := registry.TASKS.get(task)) is not None and known.shown


def main(
    run: Annotated[Path, typer.Argument(help="A folder that kvjax eval wrote.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; files in it are replaced.")],
) -> None:
    header = without_home(read_header(run))
    lines = [encoded(published(line)) for line in read_lines(run / RESULTS, read_answer)]
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "run.json", json.dumps(header, indent=2, ensure_ascii=False) + "\n")
    files = {RESULTS: b"".join(lines)}
    if (run / TIMINGS).exists():
        files[TIMINGS] = b"".join(encoded(without_home(line)) for line in read_lines(run / TIMINGS, read_timing))
    if prompts := read_prompts(run):
        files[PROMPTS] = encoded({key: texts for key, texts in prompts.items() if _shown(json.loads(key)[0])})
    for name, content in files.items():
        with new_file(out / f"{name}.gz") as new:
            new.write_bytes(gzip.compress(content, mtime=0))
    typer.echo(f"{len(lines):,} answers are in {out}")


if __name__ == "__main__":
    typer.run(main)

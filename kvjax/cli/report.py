"""`kvjax report`: makes tables and plots of the results of `kvjax eval`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown

from kvjax.cli.console import note, print_json, show_warning
from kvjax.cli.options import AsJson
from kvjax.cli.progress import Line


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that kvjax eval wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the report. Default: the folder report in the first RUN.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Compare all policies with this one by paired bootstrap; may be repeated."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the report in the folder.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make tables (Markdown, CSV, LaTeX) and plots of results: scores, curves, areas and costs, with intervals."""
    from kvjax.evaluation.report import page
    from kvjax.evaluation.report.results import read_results
    from kvjax.evaluation.report.tables import tidy
    from kvjax.files.writing import check_folder

    folder = runs[0] / "report" if out is None else out
    check_folder(folder, overwrite, page.ARGUMENT)
    with Line("making tables and plots"):
        results = read_results(runs)
        text = page.write(folder, results, against or (), show_warning, overwrite)
    if as_json:
        models = [{"model": one.model, "results": tidy(one).records()} for one in results]
        print_json({"report": str(folder), "models": models})
        return
    if sys.stdout.isatty():
        Console().print(Markdown(text))
    else:
        sys.stdout.write(text)
    note(f"the report is in {folder}")

"""`kvjax report`: makes tables and plots of the results of `kvjax eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli.console import note, show_warning
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
) -> None:
    """Make tables (Markdown, CSV, LaTeX) and plots of results: scores, curves, areas and costs, with intervals."""
    from kvjax.evaluation.report import page
    from kvjax.evaluation.report.results import read_results

    folder = runs[0] / "report" if out is None else out
    with Line("making tables and plots"):
        text = page.write(folder, read_results(runs), against or (), show_warning, overwrite)
    typer.echo(text, nl=False)
    note(f"the report is in {folder}")

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
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write this file, one row per answer, and no report without --out.")
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", help="The same as Parquet, which needs pyarrow (the extra table).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the report and these files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make tables (Markdown, CSV, LaTeX) and plots of results: scores, curves, areas and costs, with intervals."""
    from kvjax.evaluation.report import page, rows
    from kvjax.evaluation.report.results import read_results
    from kvjax.evaluation.report.tables import means
    from kvjax.files.writing import check_file, check_folder

    files = [(csv, rows.write_csv), (parquet, rows.write_parquet)]
    for path, _ in files:
        if path is not None:
            check_file(path, overwrite, "--overwrite")
    folder = None
    if out is not None or (csv is None and parquet is None):
        folder = runs[0] / "report" if out is None else out
        check_folder(folder, overwrite, page.ARGUMENT)
    elif against:
        raise ValueError(f"--against {against[0]} with --csv or --parquet: expected --out, the folder of the report")
    with Line("making tables and plots"):
        several = read_results(runs)
        text = "" if folder is None else page.write(folder, several, against or (), show_warning, overwrite)
    for path, write in files:
        if path is not None:
            note(f"{write(path, several):,} answers are in {path}")
    if as_json:
        models = [{"model": one.model, "results": means(one).records()} for one in several]
        print_json({"report": None if folder is None else str(folder), "models": models})
    elif sys.stdout.isatty() and text:
        Console().print(Markdown(text))
    else:
        sys.stdout.write(text)
    if folder is not None and not as_json:
        note(f"the report is in {folder}")
    if errors := sum(results.errors for results in several):
        show_warning(f"{errors:,} answers are missing because of errors, which the results file lists")

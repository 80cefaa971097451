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
        typer.Option(help="Compare all policies with this one on the same examples; may be repeated."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write this file, one row per answer, and no report without --out.")
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", help="The same as Parquet, which needs pyarrow (the extra table).")
    ] = None,
    leaderboard: Annotated[
        Path | None,
        typer.Option("--leaderboard", help="Write this HTML page, which ranks the policies; no report without --out."),
    ] = None,
    beside: Annotated[
        Path | None, typer.Option("--beside", help="With --leaderboard: a CSV file of a published ranking.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the report and these files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make tables (Markdown, CSV, LaTeX) and plots of results: scores, curves, areas and costs, with intervals."""
    from kvjax.evaluation.report import leaderboard as board
    from kvjax.evaluation.report import page, rows
    from kvjax.evaluation.report.beside import read_published
    from kvjax.evaluation.report.results import read_results
    from kvjax.evaluation.report.tables import mean_rows
    from kvjax.files.writing import check_file, check_folder

    files = [(csv, rows.write_csv), (parquet, rows.write_parquet)]
    given = {"--csv": csv, "--parquet": parquet, "--leaderboard": leaderboard}
    single = {option: path for option, path in given.items() if path is not None}
    for file in single.values():
        check_file(file, overwrite, "--overwrite")
    if beside is not None and leaderboard is None:
        raise ValueError(f"--beside {beside} without --leaderboard: expected both")
    published = () if beside is None else read_published(beside)
    folder = None
    if out is not None or not single:
        folder = runs[0] / "report" if out is None else out
        check_folder(folder, overwrite, page.ARGUMENT)
    elif against:
        alone = " and ".join(single)
        raise ValueError(f"--against {against[0]} with {alone}: expected --out, the folder of the report")
    with Line("making tables and plots"):
        several = read_results(runs)
        text = "" if folder is None else page.write(folder, several, against or (), show_warning, overwrite)
    for path, write in files:
        if path is not None:
            note(f"{write(path, several):,} answers are in {path}")
    if leaderboard is not None:
        with Line("making the leaderboard"):
            cells = board.write(leaderboard, several, published)
        note(f"{cells:,} cells are in {leaderboard}; open it in a browser")
    if as_json:
        models = [{"model": one.model, "results": mean_rows(one)} for one in several]
        places = {"report": folder, "leaderboard": leaderboard}
        print_json({name: None if path is None else str(path) for name, path in places.items()} | {"models": models})
    elif sys.stdout.isatty() and text:
        Console().print(Markdown(text))
    else:
        sys.stdout.write(text)
    if folder is not None and not as_json:
        note(f"the report is in {folder}")
    if errors := sum(results.errors for results in several):
        show_warning(f"answers that are missing because of errors: {errors:,}; the results file lists them")

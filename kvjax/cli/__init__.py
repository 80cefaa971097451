"""The command kvjax. Its subcommands parse options, call the library and print the results."""

from __future__ import annotations

import logging
import warnings
from typing import Annotated

import typer

from kvjax import __version__
from kvjax.cli.chat import chat
from kvjax.cli.compare import compare
from kvjax.cli.console import Commands, show_warning
from kvjax.cli.convert import convert
from kvjax.cli.demo import demo
from kvjax.cli.evaluate import evaluate
from kvjax.cli.generate import generate
from kvjax.cli.info import info
from kvjax.cli.inspect import inspect
from kvjax.cli.measure_statistics import measure_statistics
from kvjax.cli.plan import plan
from kvjax.cli.report import report
from kvjax.cli.serve import serve
from kvjax.cli.train_gates import train_gates
from kvjax.runtime.gpu_flags import set_gpu_flags

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Generate from language models under a small key-value cache.",
)
app.command()(generate)
app.command()(chat)
app.command()(info)
app.command()(plan)
app.command()(convert)
app.command()(demo)
app.command()(compare)
app.command("eval")(evaluate)
app.command()(report)
app.command()(inspect)
app.command()(serve)
app.command("train-gates")(train_gates)
app.command("measure-statistics")(measure_statistics)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvjax {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Runs the command line."""
    set_gpu_flags()
    warnings.showwarning = show_warning
    logging.getLogger("absl").setLevel(logging.ERROR)  # kvjax raises an error for what Orbax warns about
    app()

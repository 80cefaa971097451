"""Common parts of the commands: one-line errors, progress on stderr, and readable numbers."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from types import TracebackType
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from kvjax.checks import system_error
from kvjax.files.reading import read_text

LONGEST = 1000  # characters of an error
LONGEST_PROMPT = 100_000_000  # bytes
FAILED = 2  # the exit status of every expected error; a wrong option has the same status
UsageError: Any = typer.BadParameter.__base__  # of a wrong option or argument; typer does not export it


def stderr() -> Console:
    """A console that prints to stderr."""
    return Console(stderr=True, highlight=False)


class Commands(TyperGroup):
    """A command group that prints expected errors as one line on stderr and exits with status 2.

    Any other exception is a bug and keeps its traceback.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        standalone = options.pop("standalone_mode", True)
        try:
            status = super().main(*args, **options | {"standalone_mode": False})
        except UsageError as error:
            _fail(error.format_message())
            status = FAILED
        if standalone:
            sys.exit(status if isinstance(status, int) else 0)
        return status

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError, FloatingPointError) as error:
            if isinstance(error, ValueError) and not _ours(error.__traceback__):
                raise
            _fail(system_error(error) if isinstance(error, OSError) else str(error))
        except MemoryError as error:
            _fail(f"out of memory: {error}")
        except RuntimeError as error:  # JaxRuntimeError, which this module would have to import JAX for
            from kvjax.runtime.memory import out_of_memory

            if not out_of_memory(error):
                raise
            _fail(
                f"out of memory: {str(error).splitlines()[0]}; expected a smaller batch, budget or length, or --chunk"
            )
        raise typer.Exit(FAILED)


def _fail(message: str) -> None:
    """Prints an error as one line, of which the system may have made a long one by the name of a file."""
    line = " ".join(message.split())
    _echo(f"kvjax: error: {line if len(line) <= LONGEST else line[:LONGEST] + '...'}")


def _ours(traceback: TracebackType | None) -> bool:
    """Returns whether kvjax itself raised an error. Another library's ValueError means that kvjax called it wrongly."""
    name = ""
    while traceback is not None:
        name, traceback = traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_next
    return name.partition(".")[0] == "kvjax"


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Prints a warning as one line, without its place in the code, which does not help the user of a command."""
    _echo(f"kvjax: warning: {message}")


def _echo(line: str) -> None:
    """Prints a line to stderr. A terminal gets it wrapped between words, so that paths and numbers stay whole."""
    if sys.stderr.isatty():
        line = textwrap.fill(
            line, stderr().width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    typer.echo(line, err=True)


def note(text: str) -> None:
    """Prints a line to stderr; a terminal gets it dim and wrapped. The text has no markup, whatever names are in it."""
    console = stderr()
    console.print(text, style="dim", markup=False, soft_wrap=not console.is_terminal)


def print_json(document: Any) -> None:
    """Prints a JSON document to stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def numbers_table(title: str | None, first: str, *numbers: str, no_wrap: bool = False) -> Table:
    """A table whose first column has names, and whose other columns have numbers, which may wrap."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=no_wrap)
    return table


def dialogue(text: str, system: str | None) -> list[dict[str, Any]]:
    """A user's message, after a system message if there is one."""
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def prompt_text(prompt: str | None, file: Path | None, named: str) -> str:
    """The prompt, given as the argument that is called `named` or in a file.

    Raises:
        ValueError: if both or neither are given, if the file is a device, too large or not UTF-8 text, or if the prompt
            is empty.
    """
    if (prompt is None) == (file is None):
        raise ValueError(f"{named} and --prompt-file: expected exactly one of them")
    if file is not None:
        if str(file) == "-":
            return prompt_text(_stdin(), None, named)
        prompt = read_text(file, LONGEST_PROMPT, "a text file")
    if not prompt:
        raise ValueError("an empty prompt: expected a text of at least one token")
    return prompt


def _stdin() -> str:
    """The text of standard input. Raises ValueError if it is too long, as one without end is, or not UTF-8."""
    try:
        text = sys.stdin.read(LONGEST_PROMPT + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: {error}") from None
    if len(text) > LONGEST_PROMPT:
        raise ValueError(f"standard input has more than {LONGEST_PROMPT:,} characters: expected a shorter prompt")
    return text

"""The progress of long commands on stderr: a line with the time left, or in a file a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import chain, islice
from typing import Any, Self

import typer
from rich.markup import escape
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from kvjax.checks import bytes_text
from kvjax.cli.console import stderr

EVERY = 10.0  # seconds between two lines in a file


class Line:
    """A line about what a command does, how much of it is done, and how long the rest may take.

    On a terminal it is one line, which goes away at the end. Elsewhere, such as in a log file, a line says so every
    EVERY seconds.
    """

    def __init__(self, text: str, *, closely: bool = False) -> None:
        """A line about nothing but `text`, until somebody tells more.

        Args:
            text: a phrase, such as "loading demo".
            closely: as `kvjax.runtime.progress.watched` has it.
        """
        console = stderr()
        self._closely, self._text, self._began = closely, text, time.monotonic()
        self._unit, self._counts, self._counted = "", False, ""
        self._first = 0, self._began  # what was done when the counting began, and when that was
        self._ended = threading.Event()
        self._thread = None if console.is_terminal else threading.Thread(target=self._write, daemon=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
            _Column(self._amount),
            _Column(self._time),
            console=console,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task(escape(text), total=None)

    def __enter__(self) -> Self:
        from kvjax.runtime.progress import watched

        self._watched: AbstractContextManager[None] = watched(self.tell, closely=self._closely)
        self._watched.__enter__()
        if self._thread is None:
            self._progress.start()
        else:
            self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended.set()
        if self._thread is None:
            self._progress.stop()
        else:
            self._thread.join()
        self._watched.__exit__(*error)

    def tell(self, doing: Any) -> None:
        """Takes a `kvjax.runtime.progress.Doing`."""
        self._describe(doing.what)
        self._unit, self._counts = doing.unit, doing.total is not None
        if doing.total is None:  # such as a program that is compiled while something is counted
            return
        if doing.what != self._counted:
            self._counted, self._first = doing.what, (doing.done, time.monotonic())
            self._progress.reset(self._task, total=doing.total, completed=0)
        self._progress.update(self._task, total=doing.total, completed=doing.done)

    def _describe(self, text: str) -> None:
        """Says something else, which begins now."""
        if text != self._text:
            self._text, self._began = text, time.monotonic()
            self._progress.update(self._task, description=escape(text))

    def _amount(self, task: Task) -> str:
        """Says how much is done of how much; empty if it cannot be counted."""
        if not self._counts or task.total is None:
            return ""
        if self._unit == "bytes":
            return f"{bytes_text(int(task.completed))} of {bytes_text(int(task.total))}"
        return f"{int(task.completed):,} of {int(task.total):,} {self._unit}".rstrip()

    def _time(self, task: Task) -> str:
        """The time that is left at the mean speed so far, or has passed since it began if nobody knows."""
        first, since = self._first
        if self._counts and task.total is not None and task.completed > first:
            each = (time.monotonic() - since) / (task.completed - first)
            return f"{timedelta(seconds=int(each * (task.total - task.completed)))} left"
        return str(timedelta(seconds=int(time.monotonic() - self._began)))

    def sentence(self) -> str:
        """Returns the line as it is in a file."""
        (task,) = self._progress.tasks
        return f"{self._text}: {', '.join(filter(None, [self._amount(task), self._time(task)]))}"

    def say(self, text: str) -> None:
        """Prints a line to stderr."""
        typer.echo(f"kvjax: {text}", err=True)

    def _write(self) -> None:
        while not self._ended.wait(EVERY):
            self.say(self.sentence())


class Bar(Line):
    """The progress of a command that counts units of its own, such as answers, and says at which place it is."""

    def __init__(self, unit: str) -> None:
        """A bar that counts in `unit`, a plural, once `begin` has said how many there are."""
        super().__init__(unit)
        self._unit, self._counts, self._place = unit, True, unit

    def begin(self, total: int) -> None:
        """Says how many units there are."""
        self._first = 0, time.monotonic()
        self._progress.update(self._task, total=total)

    def at(self, place: str) -> None:
        """Says what is being done now."""
        self._place = place
        self._describe(place)

    def advance(self, count: int = 1) -> None:
        """Says that `count` more units are done."""
        self._progress.advance(self._task, count)

    def reach(self, count: int) -> None:
        """Says that `count` units are done."""
        self._progress.update(self._task, completed=count)

    def tell(self, doing: Any) -> None:
        """Takes a `kvjax.runtime.progress.Doing`. What is compiled is said after the place."""
        self._describe(f"{self._place}, {doing.what}" if doing.what.startswith("compiling") else self._place)


def print_pieces(pieces: Iterable[Any]) -> None:
    """Prints the text of an answer to stdout as its pieces come. The first two wait for programs to be compiled."""
    stream = iter(pieces)
    with Line("answering", closely=True):
        first = list(islice(stream, 2))
    for piece in chain(first, stream):
        sys.stdout.write(piece.text[0])
        sys.stdout.flush()
    sys.stdout.write("\n")


class _Column(ProgressColumn):
    """A column with a text."""

    def __init__(self, text: Callable[[Task], str]) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text(task))

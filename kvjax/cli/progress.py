"""The progress of long commands on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

import typer
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from kvjax.cli.console import stderr

EVERY = 30  # seconds between two lines of progress


class Speed(ProgressColumn):
    """A column with the number of units per second."""

    def render(self, task: Task) -> Text:
        return Text("" if not task.speed else f"{task.speed:.3g}/s")


class Bar:
    """What is being done, how much of it is done, its speed, and the remaining time.

    Without a terminal, such as in a log file, a line every EVERY seconds says how far the command is.
    """

    def __init__(self, unit: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """A bar that counts in `unit`, a plural, once `begin` has said how many there are."""
        console = stderr()
        self._clock, self._said = (None if console.is_terminal else clock), clock()
        self._unit, self._done, self._total, self._place = unit, 0, 0, ""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            Speed(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=120,
        )
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, total: int) -> None:
        """Says how many units there are."""
        self._total = total
        self._progress.update(self._task, total=total)

    def at(self, place: str) -> None:
        """Says what is being done now."""
        self._place = place
        self._progress.update(self._task, description=escape(place))

    def advance(self, count: int = 1) -> None:
        """Says that `count` more units are done."""
        self._done += count
        self._progress.advance(self._task, count)
        if self._clock is not None and self._clock() - self._said >= EVERY:
            self._said = self._clock()
            self.say(f"{self._done:,} of {self._total:,} {self._unit}, at {self._place}")

    def say(self, text: str) -> None:
        """Prints a line to stderr."""
        typer.echo(f"kvjax: {text}", err=True)

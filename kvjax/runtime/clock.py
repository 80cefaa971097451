"""Measures wall-clock time, and counts the time that JAX takes to compile apart."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax

from kvjax.checks import check_type

Run: TypeAlias = Callable[..., Any]
"""How programs are run: called with a program and its arguments, it returns the results."""
Result = TypeVar("Result")
COMPILING = "/jax/core/compile/"  # the events of tracing, lowering and compiling a program


def run_at_once(program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a program."""
    return program(*args, **kwargs)


class Clock:
    """Runs functions to their end and adds up their times.

    Attributes:
        seconds: the seconds that functions ran, by name. "compile" is the time for tracing and compiling their
            programs, which does not count otherwise.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, name: str, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Returns `function(*args, **kwargs)`, once it is there, and adds its time to `seconds[name]`.

        Args:
            name: any name but "compile".
        """
        compiling: list[tuple[float, float]] = []
        outer, _this_thread.compiling = getattr(_this_thread, "compiling", None), compiling
        started = time.perf_counter()
        try:
            result = jax.block_until_ready(function(*args, **kwargs))
        finally:
            _this_thread.compiling = outer
        taken, compiled = time.perf_counter() - started, _covered(compiling)
        self.seconds["compile"] += compiled
        self.seconds[name] += taken - compiled
        return result


def clock_of(given: Clock | None) -> Clock:
    """Returns the given clock, or a new one. Raises ValueError for anything else."""
    if given is not None:
        check_type("clock", given, Clock)
    return Clock() if given is None else given


_this_thread = threading.local()


def _note(event: str, duration_secs: float, **_: Any) -> None:
    """Notes the interval of an event of the compiler, which ends now, if a clock runs in this thread."""
    compiling = getattr(_this_thread, "compiling", None)
    if compiling is not None and event.startswith(COMPILING):
        now = time.perf_counter()
        compiling.append((now - duration_secs, now))


jax.monitoring.register_event_duration_secs_listener(_note)


def _covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals: programs are traced within programs."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total

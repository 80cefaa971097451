"""Measures the wall-clock time of jitted programs and counts compilation apart."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

import jax

Run: TypeAlias = Callable[..., Any]
"""How programs are run: called with a program and its arguments, it returns the results."""


def run_at_once(program: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a program, and counts nothing."""
    return program(*args, **kwargs)


class Clock:
    """Runs jitted programs to their end and adds up their times.

    Attributes:
        seconds: the seconds that programs ran, by name. "compile" is the time for tracing and compiling them.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, name: str, program: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns `program(*args, **kwargs)` and adds its time to `seconds[name]`.

        Args:
            name: any name but "compile".
            program: a function made by `jax.jit`. It is compiled first, and the timed call finds it compiled.
        """
        started = time.perf_counter()
        program.lower(*args, **kwargs).compile()
        compiled = time.perf_counter()
        result = jax.block_until_ready(program(*args, **kwargs))
        self.seconds["compile"] += compiled - started
        self.seconds[name] += time.perf_counter() - compiled
        return result

"""Measures the wall-clock time of jitted programs and counts compilation apart."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import jax


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

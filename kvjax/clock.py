"""Wall-clock time of jitted programs, with compilation counted apart."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import jax


class Clock:
    """Runs programs to their end and adds up, by name, the seconds they ran; `compile` has those of compiling them."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, name: str, program: Any, *args: Any, **kwargs: Any) -> Any:
        """`program(*args, **kwargs)`, for a program made by `jax.jit`. What it compiles, the call itself then finds."""
        started = time.perf_counter()
        program.lower(*args, **kwargs).compile()
        compiled = time.perf_counter()
        result = jax.block_until_ready(program(*args, **kwargs))
        self.seconds["compile"] += compiled - started
        self.seconds[name] += time.perf_counter() - compiled
        return result

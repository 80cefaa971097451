"""The programs of an engine, compiled ahead: a program that does not exist by then is an error, never a compilation."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax

from kvjax.runtime.compiled import key_of
from kvjax.runtime.progress import tell

# Programs of several engines reach all devices of a mesh in one order. In different orders, the collectives of one
# would wait on one device for those of another, and these on a second device for the first. The lock is held until a
# program is handed over, not until it has run.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class WarmUp:
    """The cost of starting an engine.

    Attributes:
        programs: the number of programs that were compiled. No others run later.
        seconds: the time for tracing, compiling and trying them.
    """

    programs: int
    seconds: float


class Programs:
    """Compiled programs. They are traced at once and compiled in the background; `finish` waits for all.

    A program is found by its name, or by what it runs: the function, its static arguments and the shapes of the others.
    """

    def __init__(self, placed: Callable[[Any], Any] = lambda shapes: shapes) -> None:
        """No programs.

        Args:
            placed: returns the shapes of what `call` returns, where it lies.
        """
        self._started = time.perf_counter()
        self._placed = placed
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        self._shapes: dict[Hashable, Any] = {}
        self._futures: dict[Hashable, Future[Any]] = {}
        self._compiled: dict[Hashable, Any] = {}

    def add(self, name: Hashable, program: Any, *args: Any, **static: Any) -> Any:
        """Adds the program that `program(*args, **static)` runs, and returns the shapes of its result.

        Args:
            name: by which `run` finds it.
            program: a function made by `jax.jit`.
            args: arrays or shapes. `run` takes arrays of the same shapes, and no static arguments.
            static: static arguments.
        """
        lowered = program.lower(*args, **static)
        self._compile(name, lowered)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info)

    def compile(self, program: Any, *args: Any, **static: Any) -> Any:
        """Adds what `program(*args, **static)` runs, unless it is there, and returns the shapes of its result."""
        key = key_of(program, args, static)
        if key not in self._shapes:
            self._shapes[key] = self._placed(self.add(key, program, *args, **static))
        return self._shapes[key]

    def call(self, program: Any, *args: Any, **static: Any) -> Any:
        """Runs what `compile` has added. It returns before the device has finished."""
        return self.run(key_of(program, args, static), *args)

    def _compile(self, name: Hashable, lowered: jax.stages.Lowered) -> None:
        self._futures[name] = self._pool.submit(lowered.compile)

    def finish(self) -> None:
        """Waits until everything is compiled."""
        tell("compiling", 0, len(self), "programs")
        for done, _ in enumerate(as_completed(self._futures.values()), 1):
            tell("compiling", done, len(self), "programs")
        self._compiled = {name: future.result() for name, future in self._futures.items()}
        self._pool.shutdown()

    def run(self, name: Hashable, *args: Any) -> Any:
        """Runs a program by its name. It returns before the device has finished."""
        with _one_at_a_time:
            return self._compiled[name](*args)

    def __len__(self) -> int:
        return len(self._futures)

    @property
    def workspace(self) -> int:
        """The most bytes that a program needs beside its arguments and results, on each device."""
        found = (program.memory_analysis() for program in self._compiled.values())
        return max((analysis.temp_size_in_bytes for analysis in found if analysis is not None), default=0)

    @property
    def warm_up(self) -> WarmUp:
        """The programs and the seconds until now."""
        return WarmUp(len(self), time.perf_counter() - self._started)

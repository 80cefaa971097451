"""The compiled programs of kvjax. Their number is bounded, so that a process that tries many policies does not grow.

A program belongs to a policy, to its options and to the sizes of a batch. Per layer of the model it takes some
megabytes of the host, and on a CPU some tens of the 65,530 memory maps that Linux gives a process: beyond these XLA
ends the process. JAX itself keeps up to 4,096 programs of each function.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax

from kvjax.checks import check_size
from kvjax.runtime.host_limits import available, maps_taken, return_freed

KEPT = 128  # programs, unless `keep` says otherwise
SHORT = 1 / 8  # the share of the memory that is available, below which programs are forgotten earlier
CROWDED = 1 / 2  # the share of the memory maps that are taken, above which they are, too
FEW = 16  # programs that stay even then


class _Programs:
    """The functions whose programs count, how many may stay, and how many there were when a call looked last."""

    def __init__(self) -> None:
        self.functions: list[Any] = []
        self.most = KEPT
        self.seen = 0


_programs = _Programs()


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit`, whose programs count among those of kvjax. The arguments are those of `jax.jit`."""
    jitted = jax.jit(function, **options)
    _programs.functions.append(jitted)
    return jitted


def keep(most: int) -> None:
    """Sets the number of programs that stay compiled. The default is 128.

    When a call finds more than that, kvjax forgets all of its programs, and compiles again what is used. JAX's
    persistent cache (`jax_compilation_cache_dir`) makes that fast. Programs of the caller are not touched. When less
    than an eighth of the memory of the host or container is available, or the process has half of the memory maps that
    Linux gives it, a call forgets programs if it finds more than 16.

    Raises:
        ValueError: for a number that is not in 1 .. 2**31 - 1.
    """
    check_size("most", most)
    _programs.most = most


def count() -> int:
    """The number of programs that are compiled."""
    return sum(function._cache_size() for function in _programs.functions)


def make_room() -> None:
    """Forgets all programs if there are more than the limit. Public functions call it before they compile.

    If the host or container is short of memory, or the process of maps, the limit is 16 programs at most.
    """
    found = count()
    grown, _programs.seen = found > _programs.seen, found
    if found > _programs.most or (grown and found > FEW and (available() < SHORT or maps_taken() > CROWDED)):
        _programs.seen = 0
        for function in _programs.functions:
            function.clear_cache()
        gc.collect()  # programs are in cycles
        return_freed()

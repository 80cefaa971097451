"""The compiled programs of a process that tries many policies. Their number is bounded, so that it does not grow.

Each policy has programs of its own, with each of its options and for each size of a batch. Per layer of the model a
program takes some megabytes of the host, and on a CPU some tens of the 65,530 memory maps that Linux gives a process:
beyond these XLA ends the process. JAX itself keeps up to 4,096 programs of each function.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Hashable
from contextlib import suppress
from pathlib import Path

import jax

from kvjax.checks import checked_size

KEPT = 32  # subjects, unless `keep` says otherwise; each has some six programs of its own
SHORT = 1 / 8  # the share of the memory that is available, below which programs are forgotten earlier
CROWDED = 1 / 2  # the share of the memory maps that are taken, above which they are, too
EARLIER = 8  # the factor by which fewer subjects stay then


class _Kept:
    """The number of subjects that may have programs, and those that have some."""

    def __init__(self) -> None:
        self.most = KEPT
        self.subjects: set[Hashable] = set()


_kept = _Kept()


def keep(most: int) -> None:
    """Sets the number of subjects whose programs stay compiled. The default is 32.

    Raises:
        ValueError: for a number that is not in 1 .. 2**31 - 1.
    """
    _kept.most = checked_size("most", most)


def make_room(subject: Hashable) -> None:
    """Forgets all programs of the process if too many subjects have some. A sweep calls it before it compiles others.

    When a subject is new and `keep` other ones have programs, JAX forgets every program of the process, and compiles
    again what is used. Its persistent cache (`jax_compilation_cache_dir`) makes that fast. When less than an eighth of
    the memory of the host or container is available, or the process has half of the memory maps that Linux gives it, an
    eighth of the number is enough.

    Args:
        subject: what the next programs are for, such as a policy and the sizes of a batch.
    """
    if subject in _kept.subjects:
        return
    found = len(_kept.subjects)
    if found >= _kept.most or (found >= _kept.most / EARLIER and (available() < SHORT or maps_taken() > CROWDED)):
        _kept.subjects.clear()
        jax.clear_caches()
        gc.collect()  # programs are in cycles
        return_freed()
    _kept.subjects.add(subject)


MEMORY = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # of version 2; a container sees its own
MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")


def available() -> float:
    """The share of the memory that new allocations can have, of the host's or of the container's limit: the smaller.

    1 where the system does not say.
    """
    return min(_of_host(), _of_container())


def _of_host() -> float:
    try:
        lines = (line.split() for line in MEMORY.read_text().splitlines())
        kilobytes = {name: int(number) for name, number, *_ in lines}
        return kilobytes["MemAvailable:"] / kilobytes["MemTotal:"]
    except (OSError, ValueError, KeyError):  # not Linux
        return 1.0


def _of_container() -> float:
    try:
        most, taken = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return 1 - (taken - int(counts["inactive_file"])) / most  # Linux drops cached files first
    except (OSError, ValueError, KeyError):  # not Linux, or the limit is "max"
        return 1.0


def maps_taken() -> float:
    """The share of the process's memory maps that are taken; 0 where the system does not say."""
    try:
        return MAPS.read_bytes().count(b"\n") / int(MOST_MAPS.read_text())
    except (OSError, ValueError):  # not Linux
        return 0.0


def return_freed() -> None:
    """Returns freed memory to the system, which the GNU C library otherwise keeps; other libraries need no call."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

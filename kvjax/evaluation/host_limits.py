"""The memory, and the memory maps, that the process may still take; and how it gives memory back."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

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

"""Asks devices how much they can hold, and raises one error for more."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax

GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # of containers


def device_memory(devices: Iterable[jax.Device]) -> int | None:
    """The bytes that JAX may use on each of the devices; None where neither the device nor the system states them.

    A CPU has the memory of the host, or of the container.
    """
    return min((bytes_ for device in devices if (bytes_ := _limit(device)) is not None), default=None)


def _limit(device: jax.Device) -> int | None:
    if device.platform == "cpu":
        return host_memory()
    return (device.memory_stats() or {}).get("bytes_limit")


@cache
def host_memory() -> int | None:
    """The bytes of this host, or of the container that the process runs in."""
    stated = [path.read_text().strip() for path in GROUPS if path.is_file()]
    limits = [int(text) for text in stated if text.isdigit()]
    if {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(getattr(os, "sysconf_names", {})):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)


def tree_bytes(tree: Any) -> int:
    """The bytes of all arrays of a tree, which may be shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def check_bytes(what: str, needed: int, most: int | None) -> None:
    """Raises MemoryError if `what` needs more bytes than a device has; unknown memory is not checked."""
    if most is not None and needed > most:
        raise MemoryError(
            f"{what} takes {needed:,} bytes per device, which has {most:,}: expected a smaller batch, budget or length"
        )


def out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory lacks. Some of the runtime's have another status, such as INTERNAL."""
    words = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
    runtime = isinstance(error, jax.errors.JaxRuntimeError)
    return isinstance(error, MemoryError) or (runtime and any(word in str(error) for word in words))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns the runtime's error for a lack of memory into a MemoryError with its first line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        first = str(error).splitlines()[0].rstrip(".")
        most = device_memory(jax.local_devices())
        there = "" if most is None else f", and the device has {most:,} bytes"
        raise MemoryError(f"{first}{there}: expected a smaller batch, budget or length, or chunk=") from error

"""Faults while a folder is written: a kill or a full disk at the n-th step that Python takes in that folder.

A step is what changes the file system: opening a file to write, renaming, removing, making a folder. Python announces
each one to audit hooks before it happens, and a hook that raises prevents it.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STEPS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Killed(BaseException):
    """The process is dead: nothing that it does later has an effect."""


def kill(event: str) -> None:
    """A kill, after which no step is taken."""
    raise Killed


def full(event: str) -> None:
    """A disk that is full and stays so. What is there can still be removed and renamed."""
    if event in ("open", "os.mkdir"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Hook:
    """The one audit hook: Python cannot remove hooks."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.fault: Callable[[str], None] = kill
        self.at, self.steps = 0, 0
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or not (event in STEPS or (event == "open" and self._writes(arguments))):
            return
        place = arguments[0]
        relative = event in ("os.remove", "os.rmdir") and arguments[-1] != -1  # rmtree goes by descriptors
        if not relative and not (isinstance(place, str | bytes | os.PathLike) and self._inside(place)):
            return
        self.steps += 1
        if self.steps > self.at:
            self.fault(event)

    def _inside(self, place: str | bytes | os.PathLike[str]) -> bool:
        return os.path.abspath(os.fsdecode(place)).startswith(str(self.folder))

    @staticmethod
    def _writes(arguments: tuple[Any, ...]) -> bool:
        return isinstance(arguments[2], int) and bool(arguments[2] & WRITING)


_hook: list[_Hook] = []


@contextmanager
def after(steps: int, fault: Callable[[str], None], folder: Path) -> Iterator[Callable[[], int]]:
    """Lets `steps` steps in a folder happen, and then the fault. Yields what counts the steps that were tried."""
    if not _hook:
        _hook.append(_Hook())
    (hook,) = _hook
    hook.folder, hook.fault, hook.at, hook.steps = str(folder.resolve()), fault, steps, 0
    try:
        yield lambda: hook.steps
    finally:
        hook.folder = None

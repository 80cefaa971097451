"""A limit on the time of a program that comes with a checkpoint, such as a chat template."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in a block of Python code that takes longer.

    The clock is read between two lines of Python, in the calling thread only. If a debugger or a coverage tool traces
    the thread already, the block has no limit.
    """
    if sys.gettrace() is not None:
        yield
        return
    end = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"no end within {seconds:g} seconds")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)

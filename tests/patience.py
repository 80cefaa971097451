"""How long tests wait for another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 600  # seconds. What takes one on an idle machine takes a hundred on a busy one; only what never ends fails.


def wait_for(state: Callable[[], bool], missing: Callable[[], str]) -> None:
    """Waits until `state` holds. If it never does, the test fails with what `missing` says."""
    until = time.monotonic() + PATIENCE
    while not state():
        assert time.monotonic() < until, missing()
        time.sleep(0.001)

"""The command `kvjax`. It lies outside the package, so that Ctrl-C also ends it while the package is imported."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable

INTERRUPTED = 128 + signal.SIGINT  # the exit status of shells
takers: list[Callable[[], bool]] = []  # each may take an interrupt: the process then goes on
SHOW_CURSOR = "\x1b[?25h"  # which progress bars hide


def main() -> None:
    """Runs the command line."""
    end_at_interrupt()
    from kvjax.cli import main as run

    run()


def end_at_interrupt() -> None:
    """Ends the process with status 130 as soon as it receives SIGINT.

    Python's own handler raises KeyboardInterrupt between two instructions of the main thread: after minutes if that
    thread compiles, and with jax 0.10 the process then crashes when it ends. Here the signal wakes a thread. Nothing is
    cleaned up, as after a kill: what kvjax writes is whole at any moment. When the interpreter ends, the command is
    done, and SIGINT is ignored: Python would restore the default, which kills the process.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGINT, lambda *_: None)
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the first to register is called last
    threading.Thread(target=_wait, args=(reader,), daemon=True).start()


def _wait(reader: int) -> None:
    interrupt = bytes([signal.SIGINT])  # the number of any signal that Python handles comes here
    while os.read(reader, 1) != interrupt or any(take() for take in takers):
        pass
    cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
    os.write(2, f"{cursor}\nkvjax: interrupted\n".encode())
    os._exit(INTERRUPTED)

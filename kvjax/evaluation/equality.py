"""Decides whether two answers in LaTeX are mathematically equal, by math-verify (Hugging Face, Apache-2.0)."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Timer

from kvjax.checks import installs

WORKER = Path(__file__).with_name("equality_worker.py")
LONGEST = 1_000  # characters of an answer
SECONDS = 20.0  # of one comparison; most take 0.1
START = 120.0  # seconds of importing sympy, on a busy machine


def check_installed() -> None:
    """Raises ImportError if math-verify is not installed."""
    if find_spec("math_verify") is None:
        raise ImportError(f"this metric needs math-verify: expected {installs('eval')}")


class Worker:
    """A process that compares answers. It starts with the first comparison, and again after one that did not end.

    Threads may share it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()
        atexit.register(self.end)

    def compare(self, answer: str, reference: str, seconds: float) -> bool:
        """Returns whether the texts are equal; False if that takes longer than `seconds`, or too much memory."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            try:
                print(json.dumps([answer, reference]), file=process.stdin, flush=True)
                reply = _line(process, seconds)
            except OSError:  # the process is gone
                reply = ""
            if not reply:
                self.end()
            return reply == "true"

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.end()
        check_installed()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env=os.environ | {"PYTHONHASHSEED": "0"},  # the order of sympy's sets
            start_new_session=True,  # Ctrl-C is not for it
        )
        if problem := _line(self._process, START, "its process did not start"):
            self.end()
            raise ImportError(f"math-verify cannot be used: {problem}")
        return self._process


def _line(process: subprocess.Popen[str], seconds: float, without: str = "") -> str:
    """The next line that a process writes; `without` it, if the process ends before, or is ended after `seconds`."""
    assert process.stdout is not None
    timer = Timer(seconds, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    return line[:-1] if line.endswith("\n") else without


_WORKER = Worker()


def equal(answer: str, reference: str, seconds: float = SECONDS) -> bool:
    """Returns whether an answer equals the reference, such as "0.5" and "\\frac{1}{2}", both in LaTeX without dollars.

    The comparison is not symmetric: math-verify accepts the interval "(1, 2)" where the reference is the relation
    "1 < x < 2", but not the other way round. Equal texts are equal. An answer of more than 1,000 characters that is
    another text is not, nor is one that cannot be compared within `seconds` and 4 GiB.

    Raises:
        ImportError: if math-verify is not installed.
    """
    if answer == reference:
        return True
    if len(answer) > LONGEST:
        return False
    return _WORKER.compare(answer, reference, seconds)

"""Ctrl-C in a dialogue: it ends an answer, and at the prompt it ends the command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import kvjax_command

if TYPE_CHECKING:
    from kvjax import Stream
    from kvjax.stream import Piece


class Interrupts:
    """The handling of SIGINT: it ends an answer. At all other moments it ends the process, as in every command."""

    def __init__(self) -> None:
        self._moment: Literal["other", "answering", "ending"] = "other"
        self._terminal: Any = None  # as it is before readline changes it

    def __enter__(self) -> Interrupts:
        kvjax_command.takers.append(self._take)
        return self

    def __exit__(self, *_: object) -> None:
        kvjax_command.takers.remove(self._take)

    def _take(self) -> bool:
        """Returns whether the process goes on. It runs in another thread than the dialogue, which may be compiling."""
        if self._moment == "answering":
            self._moment = "ending"
            return True
        if self._terminal is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSANOW, self._terminal)
        return False

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Within it, readline may change the terminal: SIGINT leaves it as it was."""
        try:
            import termios
        except ImportError:  # Windows
            yield
            return
        self._terminal = termios.tcgetattr(sys.stdin)
        try:
            yield
        finally:
            self._terminal = None

    def pieces(self, stream: Stream) -> Iterator[Piece]:
        """The pieces of an answer. SIGINT closes the stream after the next one; a second one ends the process."""
        self._moment = "answering"
        try:
            for piece in stream:
                yield piece
                if self._moment == "ending":
                    stream.close()
                    return
        finally:
            self._moment = "other"

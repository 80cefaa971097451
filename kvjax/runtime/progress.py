"""Tells what a long call is doing. Whoever wants to know watches; otherwise nothing is told, and nothing waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import jax

from .clock import COMPILING
from .compiled import key_of

BACKEND = f"{COMPILING}backend_compile_duration"
# Programs in the words of a user, by the names of their functions. All others are named as they are.
WORDS = {
    "begin": "the embeddings",
    "read_layers": "a layer",
    "resized": "a layer's slots",
    "last_tokens": "the last token",
    "read_along": "a layer of the last token",
    "logits_of": "the logits",
    "passes": "the passes",
    "replay_layer": "a layer of a replay",
    "run_by_itself": "a replay",
    "compared": "the scores of a layer",
    "divided": "the allocation",
    "placed": "a layer of the allocation",
    "take": "the first token",
    "decode": "the decoding loop",
    "advance": "a decode step",
}


class Doing(NamedTuple):
    """The present task of a call.

    Attributes:
        what: a phrase, such as "reading the prompt".
        done: the number of units that are done.
        total: the number of all units; None if there is nothing to count.
        unit: the units, a plural, or "bytes".
    """

    what: str
    done: int = 0
    total: int | None = None
    unit: str = ""


Report: TypeAlias = Callable[[Doing], None]
RUNNING = Doing("running")  # as long as nothing else is told


class _Watch(threading.local):
    """Who watches this thread, how closely, and what was told last.

    Attributes:
        number: of the program that runs, in the order in which a call first runs its programs.
        programs: the number of programs of the call; None if it is not known.
    """

    report: Report | None = None
    closely = False
    last: Doing = RUNNING
    running = False
    number = 0
    programs: int | None = None


_watch = _Watch()


@contextmanager
def watched(report: Report, *, closely: bool = False) -> Iterator[None]:
    """Calls `report` with what this thread does within the block: loading, compiling, reading, decoding.

    Args:
        report: is called often, and must return at once.
        closely: whether `generate` tells how many programs it compiles, each layer that has read the prompt, and how
            many tokens are decoded. It then waits for the device in between.
    """
    outer = _watch.report, _watch.closely
    _watch.report, _watch.closely, _watch.last = report, closely, RUNNING
    try:
        yield
    finally:
        _watch.report, _watch.closely = outer


def reporter() -> Report | None:
    """Returns what `watched` was given in this thread, for threads that work for it."""
    return _watch.report


def closely_watched() -> bool:
    """Returns whether this thread tells each step, and waits for it."""
    return _watch.report is not None and _watch.closely


def tell(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
    """Tells whoever watches this thread. The arguments are the fields of `Doing`."""
    if _watch.report is not None:
        _watch.last = Doing(what, done, total, unit)
        _watch.report(_watch.last)


def call(program: Callable[..., Any], *args: Any, number: int | None = None, **static: Any) -> Any:
    """Runs a program to its end. If it has to be compiled, its number is told: the next one unless it is given."""
    _watch.running, _watch.number = True, _watch.number + 1 if number is None else number
    try:
        return jax.block_until_ready(program(*args, **static))
    finally:
        _watch.running = False


class Counting:
    """Runs programs one by one, as `run_at_once` does, and tells how many have run."""

    def __init__(self, what: str, keys: Sequence[Hashable], *, more: int = 0) -> None:
        """A run of nothing.

        Args:
            what: a phrase for all of it, such as "reading the prompt".
            keys: of the programs that will run, in their order, from `key_of`.
            more: the number of other programs that the call runs afterwards.
        """
        self._what, self._calls, self._done = what, len(keys), 0
        self._numbers: dict[Hashable, int] = {}
        _watch.number, _watch.programs = 0, len(set(keys)) + more

    def run(self, program: Callable[..., Any], *args: Any, **static: Any) -> Any:
        """Returns `program(*args, **static)` once it is there."""
        number = self._numbers.setdefault(key_of(program, args, static), len(self._numbers) + 1)
        tell(self._what, self._done, self._calls, "steps")
        result = call(program, *args, number=number, **static)
        self._done += 1
        return result


def _begins(event: str, value: float | int, **about: str | int) -> None:
    """Tells of a program that this thread begins to trace, to lower or to compile."""
    if _watch.report is None or not event.startswith(COMPILING):
        return
    name = str(about.get("fun_name", "")).removeprefix("jit_").removeprefix("jit(").rstrip(")").strip("_")
    words = WORDS.get(name, name)
    if _watch.running and _watch.programs is not None:
        _watch.report(Doing(f"compiling {_watch.number} of {_watch.programs} programs: {words}"))
    elif event == BACKEND:
        _watch.report(Doing(f"compiling {words}"))


def _ended(event: str, duration_secs: float, **about: str | int) -> None:
    """Tells again what was told before a program was compiled."""
    if _watch.report is not None and event == BACKEND:
        _watch.report(_watch.last)


jax.monitoring.register_scalar_listener(_begins)
jax.monitoring.register_event_duration_secs_listener(_ended)

"""The loop's order of work, with a device that only takes notes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import pytest

from kvjax.decoding.row_text import RowText
from kvjax.engine import EngineClosedError, TooLongError
from kvjax.engine.handle import Bell
from kvjax.engine.loop import Loop
from kvjax.engine.reading import Read
from kvjax.engine.reuse import Wanted
from kvjax.engine.sizes import Sizes
from kvjax.engine.ticket import Options, Ticket

SIZES = Sizes.of(2, 64, 16, chunk=16)


class Notes:
    """A device on which token n of an answer is n, and answers end after as many tokens as their limit."""

    at_once = 4

    def __init__(self) -> None:
        self.done: list[str] = []
        self.counts = np.zeros(2, np.int32)
        self.limits = np.zeros(2, np.int32)
        self.fails = False
        self.most = 1

    def together(self, waiting: Sequence[Wanted]) -> int:
        return min(len(waiting), self.most)

    def read(self, requests: Sequence[Wanted]) -> Generator[None, None, Any]:
        longest = max(one.prompt.size for one in requests)
        if longest > SIZES.max_prompt:
            raise TooLongError
        for _ in range(SIZES.chunks(longest) - 1):
            self.done.append("chunk")
            yield
        self.done.append("chunk" if len(requests) == 1 else f"chunk of {len(requests)}")
        return Read((), (), cached=longest // 2)

    def admit(self, read: Any, start: Any, rows: Sequence[int], guides: Any = None) -> np.ndarray:
        self.done.append("admit " + " ".join(map(str, rows)))
        for row, limit in zip(rows, start.limit, strict=True):
            if row < 2:
                self.counts[row], self.limits[row] = 1, limit
        active = self.limits[[row % 2 for row in rows]] > 1
        return np.stack([np.ones_like(rows), np.zeros_like(rows), active]).astype(np.int32)[..., None]

    def advance(self, wanted: np.ndarray, most: int) -> tuple[np.ndarray, int]:
        if self.fails:
            raise FloatingPointError("no more steps")
        steps = min(most, max(1, int((self.limits - self.counts)[wanted].min())))
        self.done.append("step " + "".join("x" if one else "." for one in wanted) * steps)
        tokens = self.counts[:, None] + np.arange(1, 1 + self.at_once, dtype=np.int32)
        self.counts = np.minimum(self.counts + steps, self.limits)
        return self.report(tokens), steps

    def keep(self, tokens: np.ndarray, row: int) -> None:
        self.done.append(f"keep {row}: {tokens.tolist()}")

    def report(self, tokens: np.ndarray) -> np.ndarray:
        active = np.broadcast_to(self.counts < self.limits, tokens.shape[::-1]).T
        return np.stack([tokens, np.zeros_like(tokens), active.astype(np.int32)])


def ticket(length: int, limit: int = 16) -> Ticket:
    return Ticket.of([1] * length, Options(limit), SIZES, None, 8)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def loop(notes: Notes) -> Loop:
    return Loop(notes, 2, 8, at_once=1)


def test_running_rows_wait_for_one_chunk_at_most(loop: Loop, notes: Notes) -> None:
    loop.submit([ticket(10)])
    loop.turn()
    assert notes.done == ["chunk", "admit 0", "step x."]
    loop.submit([ticket(40)])
    for _ in range(4):
        loop.turn()
    assert notes.done[3:] == ["chunk", "step x.", "chunk", "step x.", "chunk", "admit 1", "step xx", "step xx"]


def test_short_prompts_are_read_together_as_far_as_rows_are_free(loop: Loop, notes: Notes) -> None:
    notes.most = 3
    tickets = [ticket(3, limit=4), ticket(9, limit=2), ticket(5, limit=2)]
    loop.submit(tickets)
    loop.turn()
    assert notes.done == ["chunk of 2", "admit 0 1", "step xx"]
    assert loop.rows == tickets[:2]
    while loop.busy:
        loop.turn()
    assert notes.done[3:].count("chunk") == 1
    assert "admit 1" in notes.done
    assert [[token.id for token in one.feed.tokens] for one in tickets] == [[1, 2, 3, 4], [1, 2], [1, 2]]
    assert loop.counters.finished == {"length": 3}


def test_the_others_go_on_when_one_that_is_read_is_cancelled(loop: Loop, notes: Notes) -> None:
    notes.most = 2
    first, second, third = ticket(30), ticket(20, limit=2), ticket(1, limit=2)
    loop.submit([first, second, third])
    loop.turn()
    assert (loop.busy, loop.waiting) == (2, 1)
    loop.cancel(first)
    loop.turn()
    assert notes.done == ["chunk", "chunk of 2", "admit 2 0", "step x."]
    assert first.feed.finish == "cancelled"
    assert loop.rows == [second, None]
    while loop.busy or loop.waiting:
        loop.turn()
    assert loop.counters.prompt_tokens == 20 + 1
    notes.done.clear()
    both = [ticket(30), ticket(30)]
    loop.submit(both)
    loop.turn()
    for one in both:
        loop.cancel(one)
    loop.turn()
    assert notes.done == ["chunk"]
    assert loop.busy == 0
    assert loop.counters.finished == {"cancelled": 3, "length": 2}


def test_several_steps_at_once_while_no_request_could_be_admitted(notes: Notes) -> None:
    loop = Loop(notes, 2, 8, at_once=4)
    for one in (ticket(10, limit=9), ticket(40, limit=12), ticket(10, limit=2)):
        loop.submit([one])

    def turn() -> list[str]:
        notes.done.clear()
        loop.turn()
        return list(notes.done)

    # Two rows are free, or one row is free and a prompt is read.
    assert turn() == ["chunk", "admit 0", "step x."]
    assert turn() == turn() == ["chunk", "step x."]
    assert turn() == ["chunk", "admit 1", "step xx" + 3 * "xx"]  # no row is free for the third
    assert turn() == ["step xx"]  # the first ends
    assert turn() == ["step xx"]  # the host does not know it yet
    assert turn() == ["chunk", "admit 0", "step xx"]  # the third ends
    assert turn() == ["step xx"]
    assert turn() == ["step .x" + 2 * ".x"]  # the queue is empty
    while loop.busy:
        turn()
    assert loop.counters.finished == {"length": 3}
    assert loop.counters.tokens == 9 + 12 + 2


def test_tokens_come_one_step_after_their_program(loop: Loop) -> None:
    one = ticket(3, limit=4)
    loop.submit([one])
    held = []
    for _ in range(4):
        loop.turn()
        held.append([token.id for token in one.feed.tokens])
    assert held == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert one.feed.finish == "length"
    assert loop.rows == [None, None]


def test_a_cancelled_row_is_free_before_the_next_step(loop: Loop, notes: Notes) -> None:
    first, second, third = ticket(1), ticket(1), ticket(1)
    for one in (first, second, third):
        loop.submit([one])
    loop.turn()
    loop.turn()
    notes.done.clear()
    loop.cancel(first)
    loop.turn()
    assert notes.done == ["chunk", "admit 0", "step xx"]
    assert first.feed.finish == "cancelled"
    assert len(first.feed.tokens) == 2
    assert loop.rows == [third, second]
    loop.turn()
    assert [token.id for token in third.feed.tokens] == [1, 2]
    assert len(first.feed.tokens) == 2


def test_a_cancelled_request_is_not_read_on(loop: Loop, notes: Notes) -> None:
    one, queued = ticket(64), ticket(1)
    loop.submit([one])
    loop.submit([queued])
    loop.turn()
    loop.cancel(one)
    loop.cancel(queued)
    assert queued.feed.finish == "cancelled"
    loop.turn()
    assert notes.done == ["chunk"]
    assert one.feed.finish == "cancelled"
    assert loop.busy == loop.waiting == 0
    assert loop.counters.finished == {"cancelled": 2}


def test_an_error_of_the_device_ends_everything(loop: Loop, notes: Notes) -> None:
    tickets = [ticket(1), ticket(1), ticket(1)]
    for one in tickets:
        loop.submit([one])
    notes.fails = True
    loop.run()
    for one in tickets:
        assert isinstance(one.feed.error, EngineClosedError)
        assert isinstance(one.feed.error.__cause__, FloatingPointError)
    assert loop.counters.finished == {"failed": 3}
    assert loop.busy == loop.waiting == 0
    with pytest.raises(EngineClosedError, match="the engine has failed with FloatingPointError: no more steps"):
        loop.submit([ticket(1)])


@pytest.mark.parametrize("at_once", [1, 4])
def test_an_error_of_the_text_ends_its_request_alone(notes: Notes, at_once: int) -> None:
    class Broken(RowText):
        def __init__(self) -> None:
            self.stopped = False

        def add(self, token: int, *, last: bool) -> str:
            if token == 3:
                raise UnicodeError("no text")
            return str(token)

    loop, one, other = Loop(notes, 2, 8, at_once=at_once), ticket(1, limit=5), ticket(1, limit=5)
    one.text = Broken()
    loop.submit([one])
    loop.submit([other])
    loop.close(drain=True)
    loop.run()
    assert isinstance(one.feed.error, UnicodeError)
    assert [token.text for token in one.feed.tokens] == ["1", "2"]
    assert [token.id for token in other.feed.tokens] == [1, 2, 3, 4, 5]
    assert loop.counters.tokens == 2 + 5
    assert loop.counters.finished == {"failed": 1, "length": 1}


def test_complete_answers_are_kept_before_their_clients_are_told(notes: Notes) -> None:
    """Not those that were cancelled, or that a stop string ended: their rows may have gone on."""

    class Stopping(RowText):
        stopped = False

        def __init__(self) -> None: ...

        def add(self, token: int, *, last: bool) -> str:
            self.stopped = token == 2
            return ""

    loop = Loop(notes, 2, 8, at_once=1, keeps=True)
    complete, stopped, cancelled, alone = ticket(2, limit=3), ticket(1), ticket(1), ticket(1, limit=2)
    stopped.text, alone.continues = Stopping(), False
    complete.feed.listeners.append(lambda: notes.done.append("told"))
    for one in (complete, stopped, cancelled, alone):
        loop.submit([one])
    while loop.busy or loop.waiting:
        loop.turn()
        if cancelled.feed.tokens:
            loop.cancel(cancelled)
    finished = [one.feed.finish for one in (complete, stopped, cancelled, alone)]
    assert finished == ["length", "stop", "cancelled", "length"]
    (kept,) = [i for i, what in enumerate(notes.done) if what.startswith("keep")]
    assert notes.done[kept : kept + 2] == ["keep 0: [1, 1, 1, 2]", "told"]


def test_a_conversation_that_has_left_fails_its_request_alone(notes: Notes) -> None:
    loop, one, other = Loop(notes, 2, 8, at_once=1), ticket(99), ticket(1, limit=2)
    loop.submit([one])
    loop.submit([other])
    loop.close(drain=True)
    loop.run()
    assert isinstance(one.feed.error, TooLongError)
    assert loop.counters.finished == {"failed": 1, "length": 1}


def test_close_waits_or_cancels(notes: Notes) -> None:
    for drain, finish, tokens in ((True, "length", 5), (False, "cancelled", 1)):
        loop = Loop(notes, 2, 8, at_once=1)
        tickets = [ticket(1, limit=5) for _ in range(5)]
        for one in tickets:
            loop.submit([one])
        loop.turn()
        loop.close(drain=drain)
        loop.run()
        assert {one.feed.finish for one in tickets} == {finish}
        assert len(tickets[0].feed.tokens) == tokens
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            loop.submit([ticket(1)])


def test_counts_and_histograms(loop: Loop) -> None:
    for limit in (2, 3, 4):
        loop.submit([ticket(20, limit=limit)])
    loop.close(drain=True)
    loop.run()
    stats = loop.counters.snapshot(rows=2, rows_busy=0, queue=0, cache_bytes=1)
    assert stats.requests == 3
    assert stats.finished == {"length": 3}
    assert (stats.prompt_tokens, stats.cached_tokens, stats.tokens) == (60, 30, 9)
    assert stats.first_token.count == 3
    assert stats.between_tokens.count == 6
    assert stats.tokens_per_second == 9 / stats.busy_seconds
    assert 0 < stats.first_token.quantile(0.5) <= stats.first_token.quantile(1.0) < 60
    assert stats.first_token.sum >= stats.between_tokens.sum / 6


def test_a_step_wakes_an_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many coroutines wait; and what comes after the loop has looked wakes it again."""

    async def rung() -> list[int]:
        loop, bell = asyncio.get_running_loop(), Bell.here()
        calls: list[Callable[[], None]] = []
        monkeypatch.setattr(loop, "call_soon_threadsafe", calls.append)
        events, counts = [asyncio.Event() for _ in range(4)], []
        for step in (events[:3], events[3:]):
            for event in step:
                bell.ring(loop, event)
            counts.append(len(calls))
            calls[-1]()
            assert all(event.is_set() for event in step)
        assert Bell.here() is bell
        return counts

    assert asyncio.run(rung()) == [1, 2]

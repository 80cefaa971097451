"""The loop of an engine: one thread runs it, and any thread submits, cancels and closes.

A turn reads one chunk of a prompt, or several short prompts in one, if there is a free row and a request that waits.
Then it starts a program of all rows, which takes up to `at_once` steps, until an answer ends, but one step if a request
could be admitted after it. The device works on it while the host delivers the tokens of the program before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Array, Int, Int32

from kvjax.decoding.grammars import GrammarError
from kvjax.decoding.row_guides import RowGuides
from kvjax.runtime.modes import own_modes

from .device import Device, Read
from .errors import EngineClosedError, QueueFullError, TooLongError
from .handle import Finish, Token
from .resident import Start
from .stats import Counters
from .ticket import Ticket

if TYPE_CHECKING:
    from .hosts import Leader


logger = logging.getLogger(__name__)
# The device has taken no step beyond these ends, so the row has seen what the client has, but for the last token.
COMPLETE: tuple[Finish | None, ...] = ("end", "length")


@dataclass
class Reading:
    """The requests whose prompts are being read together."""

    tickets: list[Ticket]
    units: Generator[None, None, Read]


class Loop:
    """Requests that wait, those whose prompts are read, and those in rows.

    Attributes:
        counters: what has been done.
        rows: the request of each row; None where the row is free.
        error: what later requests are refused with, once the loop has failed.
    """

    def __init__(
        self,
        device: Device | Leader,
        rows: int,
        max_queue: int,
        at_once: int,
        guides: Callable[[int], RowGuides] | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self.counters = Counters()
        self.rows: list[Ticket | None] = [None] * rows
        self._device = device
        self._max_queue = max_queue
        self._at_once = at_once
        self._guides = guides  # makes those of a number of rows
        self._keeps = keeps  # whether later requests continue finished ones
        self._queue: deque[Ticket] = deque()
        self._reading: Reading | None = None
        self._due: deque[Callable[[], None]] = deque()  # deliveries of what programs find
        self._changed = threading.Condition()  # guards the queue, and what follows
        self._closing = False
        self.error: EngineClosedError | None = None

    # Any thread.

    @property
    def capacity(self) -> int:
        """The most requests that run and wait."""
        return len(self.rows) + self._max_queue

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Appends requests to the queue: all or none, by the number of others that have not ended.

        Raises:
            QueueFullError: there is no room for all.
            EngineClosedError: the engine is closed or has failed.
        """
        with self._changed:
            if self.error is not None:
                raise self.error
            if self._closing:
                raise EngineClosedError("the engine is closed")
            # A request may be seen in its row while it is still one of those that are read.
            others = len({id(one) for one in self._accepted() if not (one.cancelled or one.feed.ended)})
            if others + len(tickets) > self.capacity:
                raise QueueFullError(
                    f"{others} requests run and wait already: expected at most {self.capacity} with the "
                    f"{len(tickets)} of this call; try again later"
                )
            self._queue.extend(tickets)
            self.counters.requests += len(tickets)
            self._changed.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request: at once if it waits, and else before the next program."""
        with self._changed:
            ticket.cancelled = True
            if ticket in self._queue:
                self._queue.remove(ticket)
                self._end(ticket)

    def close(self, *, drain: bool) -> None:
        """Refuses new requests, and ends the loop once all others have ended; without `drain` these are cancelled."""
        with self._changed:
            self._closing = True
            if not drain:
                for running in self._accepted():
                    self.cancel(running)
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._queue)

    @property
    def busy(self) -> int:
        """The number of rows that have a request, or will have one whose prompt is read."""
        return sum(ticket is not None for ticket in self.rows) + len(self._read_now)

    @property
    def _read_now(self) -> list[Ticket]:
        """The requests whose prompts are read."""
        return [] if (reading := self._reading) is None else reading.tickets

    def _accepted(self) -> list[Ticket]:
        """The requests that have not ended."""
        return [*self._queue, *self._read_now, *(ticket for ticket in self.rows if ticket is not None)]

    # The loop's thread.

    def run(self) -> None:
        """Runs turns until the engine is closed. An error ends all requests, and later ones are refused with it."""
        try:
            with own_modes():
                while self._wait():
                    started = time.perf_counter()
                    self.turn()
                    self.counters.busy_seconds += time.perf_counter() - started
        except BaseException as error:
            self._fail(error)

    def turn(self) -> None:
        """One chunk of a prompt, one program of all rows, and what the program before has found."""
        self._drop_cancelled()
        self._read()
        started = self._advance()
        while len(self._due) > started:
            self._due.popleft()()

    def _wait(self) -> bool:
        """Waits for work. Returns False if there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._queue or self._working)
            return bool(self._queue) or self._working

    @property
    def _working(self) -> bool:
        return bool(self._reading or self._due) or any(self.rows)

    def _drop_cancelled(self) -> None:
        """Frees the rows of requests that are not wanted any more."""
        for row, ticket in enumerate(self.rows):
            if ticket is not None and ticket.cancelled:
                self.rows[row] = None
                self._end(ticket)
        for ticket in self._read_now:
            if ticket.cancelled and not ticket.feed.ended:
                self._end(ticket)
        if all(ticket.feed.ended for ticket in self._read_now):
            self._reading = None

    def _read(self) -> None:
        """Reads one unit of a prompt, or of several, and admits the requests to free rows after the last one."""
        if self._reading is None and None in self.rows:
            with self._changed:
                if self._queue:
                    waiting = [ticket.wanted for ticket in islice(self._queue, self.rows.count(None))]
                    tickets = [self._queue.popleft() for _ in range(self._device.together(waiting))]
                    for ticket in tickets:
                        self.counters.begin(ticket.submitted)
                    self._reading = Reading(tickets, self._device.read([ticket.wanted for ticket in tickets]))
        if self._reading is None:
            return
        try:
            next(self._reading.units)
        except (OSError, TooLongError) as error:  # of a store, which concerns the only request that is read
            for ticket in self._read_now:
                self._lose(ticket, error)
            self._reading = None
        except StopIteration as stop:
            self._admit(self._read_now, stop.value)
            self._reading = None

    def _admit(self, tickets: Sequence[Ticket], read: Read) -> None:
        """Admits requests that have been read to free rows, but for those that have ended meanwhile."""
        guides = None
        if any(ticket.guided is not None for ticket in tickets):
            guides = self._no_guides(len(tickets))
            for i, ticket in enumerate(tickets):
                if ticket.guided is not None and not ticket.feed.ended:
                    self._guide(ticket, guides, i)
        free = (row for row, ticket in enumerate(self.rows) if ticket is None)
        rows = [len(self.rows) if ticket.feed.ended else next(free) for ticket in tickets]
        if min(rows) == len(self.rows):
            return
        report = self._device.admit(read, Start.of([ticket.start for ticket in tickets]), rows, guides)
        self._due.append(partial(self._deliver, report, 1, tickets))
        for row, ticket in zip(rows, tickets, strict=True):
            if row < len(self.rows):
                ticket.feed.cached_tokens = read.cached
                self.counters.prompt_tokens += ticket.prompt_tokens
                self.counters.cached_tokens += read.cached
                self.rows[row] = ticket

    def _advance(self) -> bool:
        """Advances all rows. Returns whether there were any."""
        if any(ticket is not None and ticket.guided is not None for ticket in self.rows):
            return self._advance_guided()
        if not any(self.rows):
            return False
        wanted = np.array([ticket is not None for ticket in self.rows])
        admits = self._reading is not None or (self._queue and None in self.rows)
        found = self._device.advance(wanted, 1 if admits else self._at_once)
        self._due.append(partial(self._finish, *found, list(self.rows)))
        return True

    def _advance_guided(self) -> bool:
        """Advances all rows by one step that follows from all tokens so far. Returns whether there were any."""
        while self._due:
            self._due.popleft()()
        guides = self._no_guides(len(self.rows))
        for row, ticket in enumerate(self.rows):
            if ticket is not None and ticket.guided is not None and not self._guide(ticket, guides, row):
                self.rows[row] = None
        if not any(self.rows):
            return False
        report = self._device.advance_guided(np.array([ticket is not None for ticket in self.rows]), guides)
        self._due.append(partial(self._finish, report, 1, list(self.rows)))
        return True

    def _no_guides(self, rows: int) -> RowGuides:
        """Guides of a number of rows that change nothing yet."""
        assert self._guides is not None, "a request has a guide, and the engine is not guided"
        return self._guides(rows)

    def _guide(self, ticket: Ticket, guides: RowGuides, row: int) -> bool:
        """Writes the guide of a request into a row. Returns False if the request cannot go on, and ends it."""
        assert ticket.guided is not None
        try:
            ticket.guided.write(guides, row)
        except GrammarError as error:
            self._lose(ticket, error)
        return not ticket.feed.ended

    def _finish(
        self, report: Int32[Array, "R B K"], steps: Int[Array, ""] | int, tickets: Sequence[Ticket | None]
    ) -> None:
        """Delivers what steps have found."""
        self.counters.steps += int(steps)
        self._deliver(report, int(steps), tickets)

    def _deliver(self, report: Int32[Array, "R B K"], steps: int, tickets: Sequence[Ticket | None]) -> None:
        """Gives each request that has not ended meanwhile its tokens."""
        tokens, bits, active, *top = np.ascontiguousarray(np.asarray(report)[:, : len(tickets), :steps])
        found = tokens.tolist(), bits.view(np.float32).tolist(), active[:, -1].astype(bool).tolist()
        for row, (ticket, ids, log_probs, goes_on) in enumerate(zip(tickets, *found, strict=True)):
            if ticket is None or ticket.feed.ended:
                continue
            taken: list[tuple[Token, Finish | None]] = []
            failure = None
            try:
                for one in ticket.take(ids, log_probs, goes_on, [each[row, 0] for each in top]):
                    taken.append(one)
            except Exception as error:  # of the tokenizer, which concerns this request alone
                failure = error
            if taken:
                new, finish = [token for token, _ in taken], taken[-1][1]
                ticket.last = self.counters.take(len(taken), ticket.submitted, ticket.last)
                if self._keeps and ticket.continues and finish in COMPLETE:  # first: then its client may go on
                    self._device.keep(ticket.seen(new), self.rows.index(ticket))
                ticket.feed.add(new, finish)
            if failure is not None:
                ticket.feed.fail(failure)
            if ticket.feed.ended:
                self.rows[self.rows.index(ticket)] = None
                self.counters.finish(ticket.feed.finish or "failed", ticket.submitted)

    def _end(self, ticket: Ticket) -> None:
        ticket.feed.end("cancelled")
        self.counters.finish("cancelled", ticket.submitted)

    def _lose(self, ticket: Ticket, error: BaseException) -> None:
        ticket.feed.fail(error)
        self.counters.finish("failed", ticket.submitted)

    def _fail(self, error: BaseException) -> None:
        """Ends everything with an error, which is logged, because no later request may come."""
        logger.error("the engine has failed", exc_info=error)
        closed = EngineClosedError(f"the engine has failed with {type(error).__name__}: {error}")
        closed.__cause__ = error
        with self._changed:
            self.error = closed
            tickets = self._accepted()
            self._queue.clear()
            self.rows, self._reading = [None] * len(self.rows), None
        for ticket in tickets:
            if not ticket.feed.ended:
                self._lose(ticket, closed)

"""Counts what an engine has done: numbers, and histograms of the times that its clients waited."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

BOUNDS = tuple(0.0005 * 2**i for i in range(18))  # seconds, to about a minute


@dataclass(frozen=True)
class Histogram:
    """Times by size.

    Attributes:
        bounds: upper bounds of the bins in seconds, ascending. The last bin has none.
        counts: the number of times in each bin; one more than bounds.
        sum: of all times, in seconds.
    """

    bounds: tuple[float, ...] = BOUNDS
    counts: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    sum: float = 0.0

    @property
    def count(self) -> int:
        """The number of times."""
        return sum(self.counts)

    def quantile(self, q: float) -> float:
        """The upper bound of the bin that the q-quantile lies in, 0 <= q <= 1; 0 without times, inf beyond bounds."""
        reached = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            reached += count
            if reached and reached >= q * self.count:
                return bound
        return 0.0


@dataclass(frozen=True)
class StoreCounts:
    """The counts of a store: of prefixes, or of conversations.

    Attributes:
        hits: requests that have continued a cache of the store.
        misses: requests whose prefix had to be read; or that have continued no cache of either store.
        nbytes: the size of the caches on the host.
        device_nbytes: the size of the caches on the devices; one that several devices hold counts once.
    """

    hits: int = 0
    misses: int = 0
    nbytes: int = 0
    device_nbytes: int = 0


@dataclass(frozen=True)
class Stats:
    """A snapshot of an engine. Counts are since its start.

    Attributes:
        rows: the number of rows.
        rows_busy: rows that have a request, or are reserved for those whose prompts are read.
        queue: the number of requests that wait for a row.
        requests: accepted requests.
        finished: the number of finished requests by reason: "end", "stop", "length", "cancelled", "failed".
        prompt_tokens: tokens of the prompts, and of the prefixes before them, of all requests that got a row.
        cached_tokens: those of them that stored caches had seen.
        tokens: tokens of answers.
        steps: decode steps of all rows.
        seconds: since the start.
        busy_seconds: during which there was work.
        first_token: times from `submit` to the first token.
        between_tokens: times between one token of a request and the next; 0 if both come from one program.
        queued: times from `submit` until the prompt begins to be read.
        whole: times from `submit` to the end of the answer, for whatever reason.
        cache_bytes: the size of the resident cache.
        prefixes: what the store of prefixes has done.
        conversations: what the store of conversations has done.
        failed: whether the loop has failed. Every request is then refused.
    """

    rows: int
    rows_busy: int
    queue: int
    requests: int
    finished: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    steps: int
    seconds: float
    busy_seconds: float
    first_token: Histogram
    between_tokens: Histogram
    queued: Histogram
    whole: Histogram
    cache_bytes: int
    prefixes: StoreCounts = StoreCounts()
    conversations: StoreCounts = StoreCounts()
    failed: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers per second during which there was work."""
        return self.tokens / self.busy_seconds if self.busy_seconds else 0.0


class _Times:
    """A histogram that grows."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.sum = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += count
        self.sum += count * seconds

    def histogram(self) -> Histogram:
        return Histogram(counts=tuple(self.counts), sum=self.sum)


@dataclass
class Counters:
    """The running counts. The loop writes them, any thread reads a snapshot."""

    started: float = field(default_factory=time.perf_counter)
    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    first_token: _Times = field(default_factory=_Times)
    between_tokens: _Times = field(default_factory=_Times)
    queued: _Times = field(default_factory=_Times)
    whole: _Times = field(default_factory=_Times)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, count: int, submitted: float, last: float | None) -> float:
        """Counts tokens of a request that come together, and returns their time.

        Args:
            count: their number.
            submitted: the time of the request.
            last: the time of the token before them; None if the first one is among them.
        """
        now = time.perf_counter()
        with self.lock:
            self.tokens += count
            if last is None:
                self.first_token.add(now - submitted)
            else:
                self.between_tokens.add(now - last)
            self.between_tokens.add(0.0, count - 1)
        return now

    def begin(self, submitted: float) -> None:
        """Counts a request whose prompt begins to be read."""
        with self.lock:
            self.queued.add(time.perf_counter() - submitted)

    def finish(self, reason: str, submitted: float) -> None:
        """Counts a finished request."""
        with self.lock:
            self.finished[reason] = self.finished.get(reason, 0) + 1
            self.whole.add(time.perf_counter() - submitted)

    def snapshot(self, **held: Any) -> Stats:
        """The counts now, with the fields of `Stats` that say what the engine holds."""
        with self.lock:
            return Stats(
                requests=self.requests,
                finished=dict(self.finished),
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self.cached_tokens,
                tokens=self.tokens,
                steps=self.steps,
                seconds=time.perf_counter() - self.started,
                busy_seconds=self.busy_seconds,
                first_token=self.first_token.histogram(),
                between_tokens=self.between_tokens.histogram(),
                queued=self.queued.histogram(),
                whole=self.whole.histogram(),
                **held,
            )

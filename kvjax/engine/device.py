"""The device's side of an engine: its programs, its resident rows, and what is read for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from kvjax.decoding.row_guides import RowGuides
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import platform_of
from kvjax.models import Decoder
from kvjax.reading.prompt import Pieces, complete

from .compiling import Programs, WarmUp
from .plans import Plans
from .reading import Read, Reader
from .resident import Resident, Start, compile_rows
from .reuse import Reuse, Wanted
from .stored import Stored
from .ticket import Ticket

# The host's part of a program takes time of a CPU's cores, so a CPU takes several steps of a small model at once.
CPU_STEPS = 16  # of a program, at most
CPU_SECONDS = 0.05  # of a program: a request that comes meanwhile waits for two of them


class Device:
    """Reads prompts, admits them to rows, and advances all rows. Nothing here waits for the device.

    Attributes:
        row: the shapes of the cache of a row.
        at_once: the most steps of a program. `start` may lower it.
        workspace: the most bytes that a program needs beside its arguments and results.
    """

    def __init__(
        self,
        params: Decoder,
        plans: Plans,
        example: Ticket,
        reuse: Reuse,
        at_once: int | None,
        guides: Callable[[int], RowGuides] | None,
    ) -> None:
        """Compiles all programs. `start` makes the rows.

        Args:
            params: the model.
            plans: the static choices.
            example: a request of one token, which is not answered.
            reuse: what requests may continue.
            at_once: the most steps of a program. None: one, and on CPUs as many as take CPU_SECONDS.
            guides: makes those of a number of rows; None if no row is guided.
        """
        self._plans, self._reuse = plans, reuse
        self._copied: Stored | None = None  # the row that was copied last, which may be on its way
        self._leaves = jax.tree.leaves(params)
        self._on_cpu = platform_of(params) == "cpu"
        self._timed = self._on_cpu and at_once is None
        self.at_once = min(at_once or (CPU_STEPS if self._on_cpu else 1), plans.sizes.max_new_tokens)
        self._programs = programs = Programs(plans.placed)
        adding = Reader(plans, params, programs.compile, plans.shapes_of)
        reads = adding.add_all(after=plans.keeps or reuse.prefixes is not None)
        self.row = reads[1].cache
        self._reader = replace(adding, run=programs.call, put=plans.put_rows)
        compile_rows(programs, plans, params, reads, example.start, at_once=self.at_once, guides=guides)
        programs.finish()
        self.workspace = programs.workspace

    def start(self, example: Ticket) -> WarmUp:
        """Makes the resident rows of an example, and runs what every request runs.

        A GPU or TPU loads a program when it runs first, so prompts of every class are read that take one chunk.
        """
        read, start = complete(self._reader.prompts([example.prompt])), self._plans.everywhere(example.start)
        self.resident: Resident = self._programs.run("idle", read.cache, start)
        reads = {1: read}
        for count, size in () if self._on_cpu else self._plans.sizes.reads:
            if size <= self._plans.sizes.chunk:
                reads[count] = complete(self._reader.prompts([np.zeros(size, np.int32)] * count))
        for count, read in reads.items():
            np.asarray(self.admit(read, Start.of([example.start] * count), range(count)))
        seconds = min(self._step_seconds() for _ in range(3))
        if self._timed:
            self.at_once = min(max(1, int(CPU_SECONDS / seconds)), self.at_once)
        return self._programs.warm_up

    def _step_seconds(self) -> float:
        """Measures the seconds of a step. On a CPU, which reads all slots, that does not depend on the rows."""
        started = time.perf_counter()
        jax.block_until_ready(self.advance(np.zeros(self._plans.sizes.rows, bool), 1))
        return time.perf_counter() - started

    @property
    def cache(self) -> KVCache:
        """The resident cache."""
        return self.resident.decoding.cache

    def together(self, waiting: Sequence[Wanted]) -> int:
        """The number of the first of these requests that are read together: they have short prompts, and no more."""
        begin = takewhile(lambda one: one.prefix is None and not self._reuse.finds(one), waiting)
        return self._plans.sizes.together(one.prompt.size for one in begin)

    def read(self, requests: Sequence[Wanted]) -> Pieces[Read]:
        """Reads requests, as many as `together` says, and yields after each unit of work but the last.

        Raises:
            TooLongError: the conversation that the only request was to continue is not there any more.
        """
        for one in requests:
            if (stored := self._reuse.take(one)) is not None:
                return (yield from self._reader.continued(one.tokens, stored))
        first = requests[0]
        self._plans.check(first.prompt.size, None if first.prefix is None else first.prefix.size, first.limit, self.row)
        if first.prefix is None:
            return (yield from self._reader.prompts([one.prompt for one in requests]))
        assert self._reuse.prefixes is not None
        return (yield from self._reader.question(first.prompt, first.prefix, self._reuse.prefixes))

    def keep(self, tokens: Int[np.ndarray, "N"], row: int) -> None:
        """Keeps the cache of a row whose answer has ended, unless there is one that has seen the same tokens.

        It goes to the host, or stays on the devices in the place of another. The copy to the host goes on while rows
        advance. At most one row is on its way, so that a device holds no more.
        """
        if not self._reuse.keeps(tokens):
            return
        if self._copied is not None:
            self._copied.settle()
        taken = Stored(tokens.size, *self._programs.run("take", self.resident, np.int32(row)))
        self._copied = self._reuse.keep(tokens, taken)
        if self._copied is not None:
            self._copied.start()

    def admit(
        self, read: Read, start: Start, rows: Sequence[int], guides: RowGuides | None = None
    ) -> Int32[Array, "R _ 1"]:
        """Puts requests that have been read into rows. A row beyond the last one is that of a request that has ended.

        Returns:
            The report of their first tokens, first.
        """
        everywhere = self._plans.everywhere
        name, last = ("admit", []) if guides is None else ("admit guided", [everywhere(guides)])
        self.resident, report = self._programs.run(
            f"{name} {len(rows)}",
            self.resident,
            read.cache,
            read.logits,
            everywhere(start),
            np.array(rows, np.int32),
            *last,
        )
        if self._plans.on_hosts:  # each part of the batch reports the same, and this process has one
            report = report.addressable_data(0)
        report.copy_to_host_async()
        return report

    def advance(self, wanted: Bool[np.ndarray, "B"], most: int) -> tuple[Int32[Array, "3 B K"], Int[Array, ""]]:
        """Steps of every active row that is wanted, until one of them ends.

        Args:
            most: the most steps, at least 1 and at most `at_once`.

        Returns:
            The report of all rows, and the number of steps.
        """
        wanted = self._plans.put_rows(wanted)
        self.resident, *found = self._programs.run("advance", self._leaves, self.resident, wanted, np.int32(most))
        for array in found:
            array.copy_to_host_async()
        report, steps = found
        return report, steps

    def advance_guided(self, wanted: Bool[np.ndarray, "B"], guides: RowGuides) -> Int32[Array, "R B 1"]:
        """One step of every active row that is wanted, with guides of all rows. Returns the report."""
        wanted, guides = jax.tree.map(self._plans.put_rows, (wanted, guides))
        self.resident, report = self._programs.run("advance guided", self._leaves, self.resident, wanted, guides)
        report.copy_to_host_async()
        return report

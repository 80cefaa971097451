"""The device's side of an engine: its programs, its resident rows, and what is read for them."""

from __future__ import annotations

from collections.abc import Generator

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32

from kvjax.kv_cache import KVCache
from kvjax.models import Decoder

from .compiling import Programs, WarmUp
from .plans import Plans
from .prefixes import PrefixStore
from .reading import compile_reads, reading, reading_after
from .resident import Resident, Start, compile_rows
from .ticket import Ticket

Read = tuple[Float[Array, "1 V"], KVCache]


class Device:
    """Reads prompts, admits them to rows, and advances all rows. Nothing here waits for the device.

    Attributes:
        row: the shapes of the cache of a row.
        workspace: the most bytes that a program needs beside its arguments and results.
    """

    def __init__(self, params: Decoder, plans: Plans, example: Ticket, store: PrefixStore | None) -> None:
        """Compiles all programs. `start` makes the rows.

        Args:
            params: the model.
            plans: the static choices.
            example: a request of one token, which is not answered.
            store: of prefixes; None if requests have none.
        """
        self._params, self._plans, self._store = params, plans, store
        self._leaves = jax.tree.leaves(params)
        self._programs = programs = Programs()
        logits, self.row = compile_reads(programs, plans, params, after=store is not None)
        compile_rows(programs, plans, params, logits, self.row, self._everywhere(example.start))
        programs.finish()
        self.workspace = programs.workspace

    def start(self, example: Ticket) -> WarmUp:
        """Makes the resident rows of an example, and runs what every request runs."""
        units = self.read(example.prompt, None)
        while True:
            try:
                next(units)
            except StopIteration as stop:
                logits, cache = read = stop.value
                break
        self.resident: Resident = self._programs.run("idle", cache, logits, self._everywhere(example.start))
        np.asarray(self.admit(read, example.start, 0))
        np.asarray(self.advance(np.zeros(self._plans.sizes.rows, bool)))
        return self._programs.warm_up

    def _everywhere(self, start: Start) -> Start:
        """The arrays of a request for each part of the batch."""
        return jax.tree.map(lambda x: self._plans.put_rows(np.repeat(x, self._plans.batch, axis=0)), start)

    @property
    def cache(self) -> KVCache:
        """The resident cache."""
        return self.resident.decoding.cache

    def read(self, prompt: Int[np.ndarray, "N"], prefix: Int[np.ndarray, "N"] | None) -> Generator[None, None, Read]:
        """Reads a prompt, after a prefix if there is one, and yields after each unit of work but the last."""
        if prefix is None:
            return reading(self._programs, self._plans, self._params, prompt)
        assert self._store is not None
        return reading_after(self._programs, self._plans, self._params, prompt, prefix, self._store)

    def admit(self, read: Read, start: Start, row: int) -> Int32[Array, "3 _"]:
        """Puts a request whose prompt has been read into a row. Returns the report of its first token, first."""
        logits, cache = read
        self.resident, report = self._programs.run(
            "admit", self.resident, cache, logits, self._everywhere(start), np.int32(row)
        )
        if self._plans.on_hosts:  # each part of the batch reports the same, and this process has one
            report = report.addressable_data(0)
        report.copy_to_host_async()
        return report

    def advance(self, wanted: Bool[np.ndarray, "B"]) -> Int32[Array, "3 B"]:
        """One token for every active row that is wanted. Returns the report of all rows."""
        self.resident, report = self._programs.run("advance", self._leaves, self.resident, self._plans.put_rows(wanted))
        report.copy_to_host_async()
        return report

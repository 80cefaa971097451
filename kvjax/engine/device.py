"""The device's side of an engine: its programs, its resident rows, and what is read for them."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from kvjax.kv_cache import KVCache
from kvjax.models import Decoder

from .compiling import Programs, WarmUp
from .reading import Plans, compile_reads, reading
from .resident import Resident, Start, admit, advance, idle
from .ticket import Ticket

Read = tuple[Float[Array, "1 V"], KVCache]


class Device:
    """Reads prompts, admits them to rows, and advances all rows. Nothing here waits for the device.

    Attributes:
        workspace: the most bytes that a program needs beside its arguments and results.
    """

    def __init__(self, params: Decoder, plans: Plans, example: Ticket) -> None:
        """Compiles all programs. `start` makes the rows.

        Args:
            params: the model.
            plans: the static choices.
            example: a request of one token, which is not answered.
        """
        self._params, self._plans = params, plans
        self._leaves, tree = jax.tree.flatten(params)
        self._programs = programs = Programs()
        sizes = plans.sizes
        logits, cache = compile_reads(programs, plans, params)
        start, size = example.start, sizes.max_new_tokens
        programs.add("idle", idle, cache, logits, start, rows=sizes.rows, size=size)
        resident = jax.eval_shape(partial(idle, rows=sizes.rows, size=size), cache, logits, start)
        programs.add("admit", admit, resident, cache, logits, start, np.int32(0))
        programs.add("advance", advance, self._leaves, resident, np.zeros(sizes.rows, bool), tree=tree)
        programs.finish()
        self.workspace = programs.workspace

    def start(self, example: Ticket) -> WarmUp:
        """Makes the resident rows of an example, and runs what every request runs."""
        units = self.read(example.prompt)
        while True:
            try:
                next(units)
            except StopIteration as stop:
                logits, cache = read = stop.value
                break
        self.resident: Resident = self._programs.run("idle", cache, logits, example.start)
        np.asarray(self.admit(read, example.start, 0))
        np.asarray(self.advance(np.zeros(self._plans.sizes.rows, bool)))
        return self._programs.warm_up

    @property
    def cache(self) -> KVCache:
        """The resident cache."""
        return self.resident.decoding.cache

    def read(self, prompt: np.ndarray) -> Generator[None, None, Read]:
        """Reads a prompt, and yields after each unit of work but the last."""
        return reading(self._programs, self._plans, self._params, prompt)

    def admit(self, read: Read, start: Start, row: int) -> Int32[Array, "3 1"]:
        """Puts a request whose prompt has been read into a row. Returns the report of its first token."""
        logits, cache = read
        self.resident, report = self._programs.run("admit", self.resident, cache, logits, start, np.int32(row))
        report.copy_to_host_async()
        return report

    def advance(self, wanted: Bool[np.ndarray, "B"]) -> Int32[Array, "3 B"]:
        """One token for every active row that is wanted. Returns the report of all rows."""
        self.resident, report = self._programs.run("advance", self._leaves, self.resident, wanted)
        report.copy_to_host_async()
        return report

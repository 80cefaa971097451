"""What a run asks, in the order of its file, before anything is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from kvjax.evaluation.batches import Batch, Reading, batches, readings
from kvjax.evaluation.grid import Cell, Grid
from kvjax.evaluation.items import Item, Refusal
from kvjax.evaluation.records import KEY, Key, key_of
from kvjax.extend import bucket
from kvjax.models import DecoderConfig
from kvjax.plan import plan_cache
from kvjax.policies import parse
from kvjax.policy import Policy

MANY = 4  # policies a host


@dataclass(frozen=True)
class Plan:
    """All that a run asks, in the order of its file.

    Attributes:
        host: this one's index, and how many there are. Each takes policies of its own where there are many, so that
            each program is compiled on one host only, and batches of its own where there are few.
    """

    grid: Grid
    items: tuple[Item, ...]
    refusals: tuple[Refusal, ...]
    config: DecoderConfig
    dtype: Any
    host: tuple[int, int] = (0, 1)

    @property
    def path(self) -> str:
        """The name of the file with results."""
        index, hosts = self.host
        return "results.jsonl" if hosts == 1 else f"results.{index}of{hosts}.jsonl"

    @property
    def timings(self) -> str:
        return self.path.replace("results", "timings")

    def errors(self) -> list[dict[str, Any]]:
        """The lines of what cannot be asked at all: examples, and cells. The first host has them."""
        if self.host[0]:
            return []
        nothing: dict[str, Any] = dict.fromkeys(KEY)
        lines = [nothing | {"task": r.task, "length": r.length, "id": r.id, "error": r.reason} for r in self.refusals]
        for cell, asked in self.cells:
            if isinstance(asked, str):
                about = {"policy": cell.label, "budget": cell.budget, "question": cell.question}
                lines.append(nothing | about | {"text": cell.policy, "error": asked})
        return lines

    def batches(self, cell: Cell) -> list[Batch]:
        """What this host asks in a cell. Raises ValueError if the policy does not suit the model."""
        policy, alike = parse(cell.policy), [policy for other, policy in self._parsed if self.beside(cell, other)]

        def most(reading: Reading) -> int:
            return min(self._rows(reading, other, len(alike) > 1) for other in alike)

        index, hosts = self.host
        names = list(dict.fromkeys(line.label for line in self.grid.policies))
        of_policies = hosts > 1 and len(names) >= MANY * hosts
        if of_policies and names.index(cell.label) % hosts != index:
            return []
        whole = policy.score.repeats_prompt or self.config.rope.depends_on_length
        asked = batches(readings(self.items, cell.question, whole), most, self.grid.mesh[0])
        return asked if of_policies else asked[index::hosts]

    @staticmethod
    def beside(cell: Cell, other: Cell) -> bool:
        """Whether two cells differ in their budget only, so that prompts are read once for both."""
        return (cell.label, cell.question) == (other.label, other.question)

    @cached_property
    def _parsed(self) -> list[tuple[Cell, Policy]]:
        """Cells with their policies, where they are any."""
        found = []
        for cell in self.grid.cells():
            with contextlib.suppress(ValueError):
                found.append((cell, parse(cell.policy)))
        return found

    def _rows(self, reading: Reading, policy: Policy, shared: bool) -> int:
        """Rows of a batch of readings like this one: what memory allows, a power of two."""
        grid = self.grid
        if grid.memory_gb is None:
            return grid.batch
        fit = max(1, int(grid.memory_gb * 1e9 / self.row_bytes(reading, policy, shared)))
        return min(grid.batch, 1 << (fit.bit_length() - 1))

    def row_bytes(self, reading: Reading, policy: Policy, shared: bool) -> int:
        """What the cache of a row takes at most: when it is compressed, and the full layers it is compressed from.

        Those are all of them if the reading is `shared` by several budgets, or by questions that a policy sees.
        """
        lead, tail = (max(sizes) for sizes in zip(*((a.lead.size, a.tail.size) for a in reading.asks), strict=True))
        length, new = reading.prompt.size + lead, reading.new_tokens + tail
        kept = _kept_bytes(self.config, policy, bucket(length), new, self.dtype)
        layers = self.config.num_layers if policy.shares or shared or lead else 1
        token = self.config.bytes_per_token(self.dtype) // self.config.num_layers
        return kept + (reading.size + lead) * token * layers

    def batch_bytes(self, batch: Batch, cell: Cell) -> int:
        """What the caches of a batch take at most."""
        policy, shared = parse(cell.policy), sum(self.beside(cell, other) for other, _ in self._parsed) > 1
        return batch.rows * max(self.row_bytes(reading, policy, shared) for reading in batch.readings)

    @cached_property
    def cells(self) -> tuple[tuple[Cell, list[Batch] | str], ...]:
        """Each cell with its batches, or with what is wrong with it."""

        def asked(cell: Cell) -> list[Batch] | str:
            try:
                return self.batches(cell)
            except ValueError as error:
                return str(error)

        return tuple((cell, asked(cell)) for cell in self.grid.cells())

    def order(self) -> Iterator[Key]:
        """The keys of the file's lines."""
        yield from map(key_of, self.errors())
        for cell, asked in self.cells:
            if not isinstance(asked, str):
                yield from keys_of(cell, asked)


@cache
def _kept_bytes(config: DecoderConfig, policy: Policy, length: int, new_tokens: int, dtype: Any) -> int:
    """Of the compressed cache of one prompt. Remembered: a grid asks for the same again and again."""
    return plan_cache(config, policy, batch=1, length=length, new_tokens=new_tokens, dtype=dtype).nbytes


def about(cell: Cell, made: Sequence[Reading]) -> list[dict[str, Any]]:
    """The beginning of each line of some readings: what it is about."""
    common = {"policy": cell.label, "budget": cell.budget, "question": cell.question}
    return [
        common | {"task": item.task.name, "length": item.length, "id": item.example.id, "asked": ask.index}
        for reading in made
        for ask in reading.asks
        for item in [ask.item]
    ]


def keys_of(cell: Cell, asked: Sequence[Batch]) -> list[Key]:
    return [key_of(line) for batch in asked for line in about(cell, batch.readings)]


def sentence(line: dict[str, Any]) -> str:
    names = ("policy", "budget", "question", "task", "length", "id")
    where = [str(line[name]) for name in names if line[name] is not None]
    return f"{' '.join(where)}: {line['error']}"


def name_of(cell: Cell) -> str:
    return cell.label if cell.budget is None else f"{cell.label} at {cell.budget}"

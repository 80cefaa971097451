"""The plan of a run: the batches of every cell, in the order of the results file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from kvjax.cache import bucket
from kvjax.evaluation.batches import Reading, ReadingBatch, batches, readings
from kvjax.evaluation.grid import Cell, Grid
from kvjax.evaluation.items import Item, Refusal
from kvjax.evaluation.lines import KEY, Key, key_of
from kvjax.kv_cache import check_groups
from kvjax.models import DecoderConfig
from kvjax.plan import plan_cache
from kvjax.policies import parse
from kvjax.policy import Policy

MANY = 4  # policies per host


@dataclass(frozen=True)
class PlannedCell:
    """A cell and the batches that this host runs in it.

    Attributes:
        cell: the cell.
        batches: the batches, in order; empty if the cell cannot run.
        error: the reason why the cell cannot run; None if it can.
    """

    cell: Cell
    batches: tuple[ReadingBatch, ...]
    error: str | None = None


@dataclass(frozen=True)
class RunPlan:
    """Everything that a run asks, in the order of its results file.

    Attributes:
        grid: the options of the run.
        items: the tokenized examples.
        refusals: the examples and tasks that cannot be asked.
        config: the config of the model.
        dtype: the dtype of the cache.
        host: this host's index and the number of hosts. If there are many policies, each host takes some of the
            policies, so that each program is compiled on one host only. If there are few, each host takes some of the
            batches of every policy.
    """

    grid: Grid
    items: tuple[Item, ...]
    refusals: tuple[Refusal, ...]
    config: DecoderConfig
    dtype: Any
    host: tuple[int, int] = (0, 1)

    @property
    def path(self) -> str:
        """The name of the results file."""
        index, hosts = self.host
        return "results.jsonl" if hosts == 1 else f"results.{index}of{hosts}.jsonl"

    @property
    def timings(self) -> str:
        """The name of the timings file."""
        return self.path.replace("results", "timings")

    def errors(self) -> list[dict[str, Any]]:
        """The lines of refused examples and of cells that cannot run. Only the first host writes them."""
        if self.host[0]:
            return []
        nothing: dict[str, Any] = dict.fromkeys(KEY)
        lines = [nothing | {"task": r.task, "length": r.length, "id": r.id, "error": r.reason} for r in self.refusals]
        for planned in self.cells:
            if planned.error is not None:
                lines.append(
                    nothing | cell_fields(planned.cell) | {"text": planned.cell.policy, "error": planned.error}
                )
        return lines

    def batches(self, cell: Cell) -> list[ReadingBatch]:
        """The batches that this host runs in a cell. Raises ValueError if the policy does not suit the model."""
        policy, alike = parse(cell.policy), [policy for other, policy in self._parsed if self.beside(cell, other)]
        policy.budget.check_model(self.config.num_layers, self.config.num_kv_heads)
        check_groups(policy.budget, self.config.num_kv_heads, self.grid.mesh[1])

        def most(reading: Reading) -> int:
            return min(self._rows(reading, other, len(alike) > 1) for other in alike)

        index, hosts = self.host
        names = list(dict.fromkeys(line.label for line in self.grid.policies))
        of_policies = hosts > 1 and len(names) >= MANY * hosts
        if of_policies and names.index(cell.label) % hosts != index:
            return []
        one_call = policy.score.needs.whole_prompt or self.config.rope.depends_on_length
        asked = batches(readings(self.items, cell.question, one_call), most, self.grid.mesh[0])
        return asked if of_policies else asked[index::hosts]

    @staticmethod
    def beside(cell: Cell, other: Cell) -> bool:
        """Whether two cells differ in their budget only, so that one prefill serves both."""
        return (cell.label, cell.question) == (other.label, other.question)

    @cached_property
    def _parsed(self) -> list[tuple[Cell, Policy]]:
        """All cells with their policies."""
        return [(cell, parse(cell.policy)) for cell in self.grid.cells()]

    def _rows(self, reading: Reading, policy: Policy, reused: bool) -> int:
        """The number of rows, a power of two, for which the caches of such readings fit into the grid's memory."""
        grid = self.grid
        if grid.memory_gb is None:
            return grid.batch
        fit = max(1, int(grid.memory_gb * 1e9 / self.row_bytes(reading, policy, reused)))
        return min(grid.batch, 1 << (fit.bit_length() - 1))

    def row_bytes(self, reading: Reading, policy: Policy, reused: bool) -> int:
        """The largest number of bytes of a row's cache: the compressed cache and the full layers that it is made from.

        The full cache has one layer at a time in general. It has all layers if a budget is divided among layers, if
        several budgets use the reading (`reused`), or if several questions use it before the compression.
        """
        lead, tail = (max(sizes) for sizes in zip(*((a.lead.size, a.tail.size) for a in reading.asks), strict=True))
        length, new = reading.prompt.size + lead, reading.new_tokens + tail
        kept = _kept_bytes(self.config, policy, bucket(length), new, self.dtype)
        layers = self.config.num_layers if policy.allocates or reused or lead else 1
        token = self.config.bytes_per_token(self.dtype) // self.config.num_layers
        return kept + (reading.size + lead) * token * layers

    def batch_bytes(self, batch: ReadingBatch, cell: Cell) -> int:
        """The largest number of bytes that the caches of a batch take."""
        policy, reused = parse(cell.policy), sum(self.beside(cell, other) for other, _ in self._parsed) > 1
        return batch.rows * max(self.row_bytes(reading, policy, reused) for reading in batch.readings)

    @cached_property
    def cells(self) -> tuple[PlannedCell, ...]:
        """All cells of the grid with their batches or their errors."""

        def planned(cell: Cell) -> PlannedCell:
            try:
                return PlannedCell(cell, tuple(self.batches(cell)))
            except ValueError as error:
                return PlannedCell(cell, (), str(error))

        return tuple(map(planned, self.grid.cells()))

    def order(self) -> Iterator[Key]:
        """The keys of the lines of the results file, in its order."""
        yield from map(key_of, self.errors())
        for planned in self.cells:
            yield from keys_of(planned.cell, planned.batches)


@cache
def _kept_bytes(config: DecoderConfig, policy: Policy, length: int, new_tokens: int, dtype: Any) -> int:
    """The bytes of the compressed cache of one prompt. A grid needs the same values many times, so they are cached."""
    return plan_cache(config, policy, batch=1, length=length, new_tokens=new_tokens, dtype=dtype).nbytes


def cell_fields(cell: Cell) -> dict[str, Any]:
    """The fields of a line that identify its cell."""
    return {"policy": cell.label, "budget": cell.budget, "question": cell.question}


def about(cell: Cell, made: Sequence[Reading]) -> list[dict[str, Any]]:
    """The fields that identify the lines of some readings, one mapping per question."""
    return [
        cell_fields(cell) | {"task": item.task.name, "length": item.length, "id": item.example.id, "asked": ask.index}
        for reading in made
        for ask in reading.asks
        for item in [ask.item]
    ]


def keys_of(cell: Cell, asked: Sequence[ReadingBatch]) -> list[Key]:
    """The keys of the lines of some batches of a cell."""
    return [key_of(line) for batch in asked for line in about(cell, batch.readings)]


def sentence(line: dict[str, Any]) -> str:
    """The error of a line as text, with the fields that identify the line."""
    names = ("policy", "budget", "question", "task", "length", "id")
    where = [str(line[name]) for name in names if line[name] is not None]
    return f"{' '.join(where)}: {line['error']}"


def name_of(cell: Cell) -> str:
    """The name of a cell's policy and budget in messages."""
    return cell.label if cell.budget is None else f"{cell.label} at {cell.budget}"

"""The plan of a run: the batches of every cell, in the order of the results file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from kvjax.cache import bucket, room_for
from kvjax.evaluation.batches import Reading, ReadingBatch, batches, power_of_two, readings
from kvjax.evaluation.entries import Cell
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item, Refusal
from kvjax.evaluation.lines import KEY, Key, key_of
from kvjax.evaluation.tasks import registry
from kvjax.models import DecoderConfig
from kvjax.plan import plan_cache
from kvjax.policy import Policy
from kvjax.policy.suits import check_suits

FULL_CACHES = 16  # the memory of all caches of a batch, in uncompressed caches of it, for a grid without a limit


@dataclass(frozen=True)
class PlannedCell:
    """A cell and its batches.

    Attributes:
        cell: the cell.
        batches: the batches, in order; empty if the cell cannot run.
        error: the reason why the cell cannot run; None if it can.
    """

    cell: Cell
    batches: tuple[ReadingBatch, ...]
    error: str | None = None


@dataclass(frozen=True)
class Sweep:
    """Cells whose batches are the same, and which share the prefill of each batch.

    Attributes:
        cells: the cells, in the order of the grid; one alone if rows are refilled.
        batches: the batches of each of them.
        refilled: whether a row that has ended takes the next prompt, of any of the batches; otherwise each batch ends
            with its longest answer.
    """

    cells: tuple[Cell, ...]
    batches: tuple[ReadingBatch, ...]
    refilled: bool = False


@dataclass(frozen=True)
class RunPlan:
    """Everything that a run asks, in the order of its results file.

    Attributes:
        grid: the options of the run.
        items: the tokenized examples.
        refusals: the examples and tasks that cannot be asked.
        config: the config of the model.
        dtype: the dtype of the cache.
    """

    grid: Grid
    items: tuple[Item, ...]
    refusals: tuple[Refusal, ...]
    config: DecoderConfig
    dtype: Any

    def errors(self) -> list[dict[str, Any]]:
        """The lines of refused examples and of cells that cannot run."""
        nothing: dict[str, Any] = dict.fromkeys(KEY)
        lines = [nothing | {"task": r.task, "length": r.length, "id": r.id, "error": r.reason} for r in self.refusals]
        for planned in self.cells:
            if planned.error is not None:
                lines.append(
                    nothing | cell_fields(planned.cell) | {"text": planned.cell.policy, "error": planned.error}
                )
        return lines

    def settles(self, key: Key) -> bool:
        """Returns whether the plan asks what an earlier run refused, a cell, a task or an example, by its line's key.

        A name that is no task is refused by each run that has it.
        """
        *cell, task, length, name, _ = key
        if task is None:
            return tuple(cell) in {tuple(cell_fields(known).values()) for known in self.grid.cells()}
        if cell != [None] * len(cell):  # an answer that is missing
            return False
        if name is None and task not in registry.TASKS:
            return True
        return any((task, length, name or i.example.id) == (i.task.name, i.length, i.example.id) for i in self.items)

    def fixed_tasks(self) -> dict[str, dict[str, Any]]:
        """Returns what answers to each task depend on beside its name, of those that state it."""
        return {item.task.name: dict(item.task.fixed) for item in self.items if item.task.fixed}

    def batches(self, cell: Cell) -> list[ReadingBatch]:
        """The batches of a cell. Raises ValueError if the policy does not suit the model."""
        policy = cell.build()
        alike = [other for near, other in self._parsed if (near.label, near.question) == (cell.label, cell.question)]
        check_suits(policy, self.config, self.grid.mesh[1])

        def most(reading: Reading) -> int:
            return min(self._rows(reading, other) for other in alike)

        return batches(readings(self.items, cell.question, self._one_call(policy)), most, self.grid.mesh[0])

    def _one_call(self, policy: Policy) -> bool:
        """Returns whether a policy needs each prompt in one part."""
        return policy.score.needs.whole_prompt or self.config.rope.depends_on_length

    @cached_property
    def sweeps(self) -> tuple[Sweep, ...]:
        """The cells that can run, divided into those that share their prefills.

        Policies share a prefill if their batches are the same, they treat a prompt alike until they compress it, and
        their caches fit into the memory together. Where rows are refilled, answers are long and a cell has prefills of
        its own: its rows hold answers of several batches, so other policies would have to hold theirs for as long.
        """
        alike: dict[Any, list[PlannedCell]] = {}
        refilled = []
        for planned in self.cells:
            padded = tuple(batch for batch in planned.batches if not batch.refilled)
            own = [batch for batch in planned.batches if batch.refilled]
            refilled += [Sweep((planned.cell,), shared, refilled=True) for shared in self._sharing(planned.cell, own)]
            if padded:
                policy, shapes = planned.cell.build(), tuple(batch.rows for batch in padded)
                in_one = planned.cell.question == "before" and self._one_call(policy)
                key = planned.cell.question, policy.positions, policy.storage, in_one, shapes
                alike.setdefault(key, []).append(replace(planned, batches=padded))
        return (*(sweep for cells in alike.values() for sweep in self._divided(cells)), *refilled)

    def _sharing(self, cell: Cell, batches: Sequence[ReadingBatch]) -> list[tuple[ReadingBatch, ...]]:
        """Divides batches, the longest first, into those that share rows, the one with most rows first.

        All rows get the slots of the longest prompt, and steps attend to all slots. So batches share rows if the
        longest has less than twice the slots of each, and if the rows fit into the memory with these slots.
        """
        policy, shared = cell.build(), list[list[ReadingBatch]]()
        most = math.inf if self.grid.memory_gb is None else self.grid.memory_gb * 1e9
        for batch in batches:
            together = [*(shared[-1] if shared else ()), batch]
            first, rows = together[0].readings[0], max(one.rows for one in together)
            alike = first.size + first.new_tokens < 2 * (batch.readings[0].size + batch.readings[0].new_tokens)
            if shared and alike and rows * self.row_bytes(first, [policy]) <= most:
                shared[-1].append(batch)
            else:
                shared.append([batch])
        return [tuple(sorted(together, key=lambda batch: -batch.rows)) for together in shared]

    def rows_together(self, batches: Sequence[ReadingBatch], policy: Policy) -> int:
        """The number of rows that batches share: one for each question, as far as the rows fit into the memory."""
        readings = [reading for batch in batches for reading in batch.readings]
        longest = max(readings, key=lambda reading: reading.size)
        questions = power_of_two(sum(len(reading.asks) for reading in readings))
        rows = min(self._rows(longest, policy), questions)
        return max(rows // self.grid.mesh[0] * self.grid.mesh[0], *(batch.rows for batch in batches))

    def _divided(self, cells: Sequence[PlannedCell]) -> Iterator[Sweep]:
        """Divides cells with the same batches into sweeps whose caches fit into the memory."""
        together: list[PlannedCell] = []
        for planned in cells:
            more = [*together, planned]
            policies = [one.cell.build() for one in more]
            if together and any(self.batch_bytes(batch, policies) > self._most(batch) for batch in planned.batches):
                yield Sweep(tuple(one.cell for one in together), together[0].batches)
                more = [planned]
            together = more
        yield Sweep(tuple(one.cell for one in together), together[0].batches)

    def _most(self, batch: ReadingBatch) -> float:
        """The largest number of bytes that the caches of a batch may take."""
        if self.grid.memory_gb is not None:
            return self.grid.memory_gb * 1e9
        return FULL_CACHES * batch.rows * max(r.size for r in batch.readings) * self.config.bytes_per_token(self.dtype)

    @cached_property
    def _parsed(self) -> list[tuple[Cell, Policy]]:
        """All cells with their policies."""
        return [(cell, cell.build()) for cell in self.grid.cells()]

    def _rows(self, reading: Reading, policy: Policy) -> int:
        """The number of rows, a power of two, for which the caches of such readings fit into the grid's memory."""
        grid = self.grid
        if grid.memory_gb is None:
            return grid.batch
        fit = max(1, int(grid.memory_gb * 1e9 / self.row_bytes(reading, [policy])))
        return min(grid.batch, 1 << (fit.bit_length() - 1))

    def row_bytes(self, reading: Reading, policies: Sequence[Policy], turns: int = 1) -> int:
        """The largest number of bytes of a row's caches, if several policies share a prefill.

        These are the compressed caches of all policies, copies of those whose answers take steps together and extend
        them, at most `turns` of equal size, and the full layers that they are made from. Rows that are refilled hold
        one more such copy, while the next batch waits for them. A budget that is divided among layers has its cache
        only until its answers are generated.
        There is one full layer at a time in general. There are all layers if a budget is divided among them, or if
        several questions use the prefill before the compression. Values of latents lie beside keys in full layers only
        if a policy changes entries.
        """
        lead, tail = reading.longest
        length, new = reading.prompt.size + lead, reading.new_tokens + tail

        def kept(policy: Policy, new_tokens: int) -> int:
            return _kept_bytes(self.config, policy, bucket(length), room_for(new_tokens), self.dtype)

        held = sum(kept(policy, 1) for policy in policies if not policy.allocates)
        sizes = Counter(kept(policy, new) + policy.allocates * kept(policy, 1) for policy in policies)
        extended = max(size * min(turns, n * len(reading.asks)) for size, n in sizes.items())
        layers = self.config.num_layers if lead or any(policy.allocates for policy in policies) else 1
        token = -(-self.config.bytes_per_token(self.dtype) // self.config.num_layers)
        twice = self.config.latent is not None and any(policy.changes_entries for policy in policies)
        return held + extended * (1 + reading.refilled) + (reading.size + lead) * token * layers * (1 + twice)

    def batch_bytes(self, batch: ReadingBatch, policies: Sequence[Policy]) -> int:
        """The largest number of bytes that the caches of a batch take, if several policies share its prefill."""
        turns = max((self.grid.decode_rows or 0) // batch.rows, 1)
        return batch.rows * max(self.row_bytes(reading, policies, turns) for reading in batch.readings)

    @cached_property
    def cells(self) -> tuple[PlannedCell, ...]:
        """All cells of the grid with their batches or their errors."""

        def planned(cell: Cell) -> PlannedCell:
            try:
                return PlannedCell(cell, tuple(self.batches(cell)))
            except ValueError as error:
                return PlannedCell(cell, (), str(error))

        return tuple(map(planned, self.grid.cells()))

    def keys(self) -> list[Key]:
        """The keys of all answers, in the order of the results file, where those of `errors` precede them."""
        return [key for each in self.cells for batch in each.batches for key in keys_of(each.cell, batch.readings)]


@cache
def _kept_bytes(config: DecoderConfig, policy: Policy, length: int, new_tokens: int, dtype: Any) -> int:
    """The bytes of the compressed cache of one prompt, for a padded length and the room of an answer.

    A grid needs the same values many times, and a plan is slow to trace, so they are cached.
    """
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


def keys_of(cell: Cell, made: Sequence[Reading]) -> list[Key]:
    """The keys of the lines of some readings of a cell."""
    return [key_of(line) for line in about(cell, made)]


def sentence(line: dict[str, Any]) -> str:
    """The error of a line as text, with the fields that identify the line."""
    names = ("policy", "budget", "question", "task", "length", "id")
    where = [str(line[name]) for name in names if line[name] is not None]
    return f"{' '.join(where)}: {line['error']}"


def name_of(cell: Cell) -> str:
    """The name of a cell's policy and budget in messages."""
    return cell.label if cell.budget is None else f"{cell.label} at {cell.budget}"

"""Runs a plan: answers every batch under all policies that share its prefill and records each answer immediately."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import jax

from kvjax.evaluation.asking import Answer, Answers, Took
from kvjax.evaluation.batches import Ask, Reading, ReadingBatch, halves
from kvjax.evaluation.grid import Cell
from kvjax.evaluation.header import check_results, written_header
from kvjax.evaluation.lines import checked_scores, encoded, key_of, read_timing
from kvjax.evaluation.planning import RunPlan, about, cell_fields, keys_of, name_of, sentence
from kvjax.evaluation.records import Records, repaired
from kvjax.policies import parse
from kvjax.policy import Policy

Answering: TypeAlias = Callable[[ReadingBatch, Sequence[Policy]], Iterator[tuple[Answers, Took]]]


class Watch(Protocol):
    """Receives the progress of a run."""

    def begin(self, answers: int) -> None:
        """The run starts; `answers` answers are missing."""
        return None

    def cell(self, cell: Cell) -> None:
        """The answers that follow belong to `cell`."""
        return None

    def advance(self, answers: int) -> None:
        """`answers` more answers are recorded."""
        return None

    def say(self, text: str) -> None:
        """Reports an event that the user should know about."""
        return None


class Silent(Watch):
    """Ignores the progress."""


@dataclass(frozen=True)
class Summary:
    """The outcome of a run.

    Attributes:
        answers: the number of planned answers that are in the results file.
        planned: the number of planned answers.
        new: the number of answers that this run added.
        errors: one line of text for each example, cell or answer that failed.
    """

    answers: int
    planned: int
    new: int
    errors: tuple[str, ...]


def run(plan: RunPlan, ask: Answering, out: Path, watch: Watch | None = None) -> Summary:
    """Answers the questions of a plan that the folder `out` lacks, and sorts its results file.

    Raises:
        ValueError: if the folder holds results of another model, other data or another seed, or if another run uses it.
    """
    watch = watch or Silent()
    out.mkdir(parents=True, exist_ok=True)
    check_results(plan, out)
    with (
        Records(out / plan.path, watch.say) as records,
        written_header(plan, out),
        _timings(out / plan.timings, watch.say) as timings,
    ):
        cells = [planned for planned in plan.cells if planned.error is None]
        errors = plan.errors()
        records.append(errors)
        planned = [key for one in cells for key in keys_of(one.cell, one.batches)]
        before = sum(key in records for key in planned)
        watch.begin(len(planned) - before)
        for sweep in plan.sweeps:
            missing = [
                (batch, those)
                for batch in sweep.batches
                if (those := [c for c in sweep.cells if not all(key in records for key in keys_of(c, [batch]))])
            ]
            if not missing:
                continue
            for lines, timing in _Sweep(plan, ask, watch).answers(missing):
                errors += [line for line in lines if "error" in line]
                new = sum(key_of(line) not in records for line in lines)
                records.append(lines)
                timings.write(encoded(timing))
                timings.flush()
                watch.advance(new)
        records.finish(plan.order())
        after = sum(key in records for key in planned)
    return Summary(after, len(planned), after - before, tuple(map(sentence, errors)))


def _timings(path: Path, say: Callable[[str], None]) -> BinaryIO:
    """Opens the timings file to append to it, after the lines that a kill left incomplete are dropped."""
    repaired(path, read_timing, say, "its times are lost")
    return path.open("ab")


class _Sweep:
    """Runs cells that share their prefills.

    If the memory is exceeded, the cells are halved first, down to one, and then the batch, which all cells share again.
    The sizes that fit stay for all later batches. A cell that fails on its own is asked on its own from then on, so
    that its failures do not affect the others.
    """

    def __init__(self, plan: RunPlan, ask: Answering, watch: Watch):
        self.plan, self.ask, self.watch = plan, ask, watch
        self.most_rows: int | None = None
        self.most_cells: int | None = None
        self.apart: set[Cell] = set()

    def answers(
        self, asked: Sequence[tuple[ReadingBatch, list[Cell]]]
    ) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
        """Yields the lines and the timing of each batch in each of its cells, in order."""
        waiting = list(reversed(asked))
        multiple = self.plan.grid.mesh[0]
        while waiting:
            batch, cells = waiting.pop()
            parts = halves(batch, multiple)
            if self.most_rows is not None and batch.rows > self.most_rows:
                waiting += [(part, cells) for part in reversed(parts)]
                continue
            if len(divided := self._divided(cells)) > 1:
                waiting += [(batch, some) for some in reversed(divided)]
                continue
            left = list(cells)
            try:
                for cell, (answers, took) in zip(cells, self.ask(batch, [parse(c.policy) for c in cells]), strict=True):
                    self.watch.cell(cell)
                    yield self._lines(cell, batch, answers), self._timing(cell, batch, took, len(cells))
                    left.remove(cell)
            except (
                Exception
            ) as error:  # a policy may raise anything; the error is reported for each example that it affects
                problem, full = f"{type(error).__name__}: {error}", out_of_memory(error)
            else:
                continue
            if full and len(left) > 1:
                self.most_cells = (len(left) + 1) // 2
                self.watch.say(
                    f"{name_of(left[0])}: out of memory with the caches of {len(cells)} policies and budgets; the run "
                    f"continues with {self.most_cells}"
                )
                waiting.append((batch, left))
            elif full and parts[0].rows < batch.rows:
                self.most_rows, self.most_cells = parts[0].rows, None
                self.watch.say(
                    f"{name_of(left[0])}: out of memory with {batch.rows} prompts; the run continues with "
                    f"{self.most_rows}"
                )
                waiting += [(part, left) for part in reversed(parts)]
            elif len(left) > 1:
                middle = (len(left) + 1) // 2
                waiting += [(batch, left[middle:]), (batch, left[:middle])]
            elif not full and len(batch.readings) > 1:
                self.apart.add(left[0])
                waiting += [(part, left) for part in reversed(parts)]
            else:
                self.apart.add(left[0])
                lines = [line | {"error": problem} for line in about(left[0], batch.readings)]
                yield lines, self._timing(left[0], batch, None, 1)

    def _divided(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """The cells that may share a prefill: not those that failed, and no more than the memory holds."""
        sound = [cell for cell in cells if cell not in self.apart]
        size = self.most_cells or max(len(sound), 1)
        groups = [sound[i : i + size] for i in range(0, len(sound), size)]
        return groups + [[cell] for cell in cells if cell in self.apart]

    def _lines(self, cell: Cell, batch: ReadingBatch, answers: Answers) -> list[dict[str, Any]]:
        common = {"text": cell.policy, "seed": self.plan.grid.seed, "versions": versions()}
        heads = iter(about(cell, batch.readings))
        return [
            next(heads) | _marked(reading, ask, answer) | common
            for reading, mine in zip(batch.readings, answers, strict=True)
            for ask, answer in zip(reading.asks, mine, strict=True)
        ]

    def _timing(self, cell: Cell, batch: ReadingBatch, took: Took | None, shared: int) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        answers = sum(len(reading.asks) for reading in batch.readings)
        facts = cell_fields(cell) | {
            "rows": batch.rows,
            "prompts": len(batch.readings),
            "answers": answers,
            "shared": shared,
            "prompt_size": batch.readings[0].size,
            "device": jax.devices()[0].device_kind if took is not None else None,
            "ended": now,
        }
        return facts | ({} if took is None else asdict(took))


def _marked(reading: Reading, ask: Ask, answer: Answer) -> dict[str, Any]:
    """The fields of an answer: its scores, or an error if it cannot be marked."""
    question = ask.item.example.questions[ask.index]
    facts = {
        "prediction": answer.text,
        "answers": list(question.answers),
        "tokens": answer.tokens,
        "prompt_tokens": reading.prompt.size + ask.lead.size + ask.tail.size,
        "cut": ask.item.cut,
        "compressed_tokens": reading.prompt.size + ask.lead.size,
        "kept": answer.kept,
        "kv_bytes": answer.kv_bytes,
        "kv_bytes_end": answer.kv_bytes_end,
        "meta": {**ask.item.example.meta, **question.meta},
    }
    try:
        return {"scores": checked_scores(ask.item.task.metric(answer.text, question))} | facts
    except Exception as error:  # a judge that does not answer, a package that is missing
        return {"error": f"the answer could not be marked: {type(error).__name__}: {error}"} | facts


def out_of_memory(error: BaseException) -> bool:
    """Whether the error says that the host or a device is out of memory."""
    return isinstance(error, MemoryError) or (
        isinstance(error, jax.errors.JaxRuntimeError)
        and any(word in str(error) for word in ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory"))
    )


def versions() -> dict[str, str]:
    """The versions of the libraries that answers depend on."""
    found = {"jax": jax.__version__}
    try:
        found["kvjax"] = importlib.metadata.version("kvjax")
    except importlib.metadata.PackageNotFoundError:  # on the path, not installed
        found["kvjax"] = "unknown"
    return found

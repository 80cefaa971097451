"""Runs a plan: finds what its results file lacks, has it answered, and records each answer immediately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias

from kvjax.evaluation.entries import Cell
from kvjax.evaluation.header import check_policies, check_results, write_header
from kvjax.evaluation.lines import Key, Line, encoded, key_of, read_timing
from kvjax.evaluation.planning import RunPlan, sentence
from kvjax.evaluation.records import RESULTS, TIMINGS, Records, repaired
from kvjax.evaluation.sweeping import Answering, Part, Say, Sweeping, Task
from kvjax.files.writing import check_folder

Work: TypeAlias = Callable[[Sequence[Task], Say], Iterator[Part]]
"""Answers tasks in any order. It tells the user of events by the function that it gets."""


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


def run(plan: RunPlan, load: Callable[[], Answering], out: Path, watch: Watch | None = None) -> Summary:
    """Answers the questions of a plan in this process. Arguments and errors are those of `record`.

    Args:
        load: loads the model. It is called once the folder is known to suit the plan, if an answer is missing.
    """
    return record(plan, partial(_here, plan, load), out, watch)


def _here(plan: RunPlan, load: Callable[[], Answering], tasks: Sequence[Task], say: Say) -> Iterator[Part]:
    if not tasks:
        return
    ask = load()
    for task in tasks:
        yield from Sweeping(plan, ask, say).answers(task)


def record(plan: RunPlan, work: Work, out: Path, watch: Watch | None = None) -> Summary:
    """Has the questions of a plan answered that the folder `out` lacks, and sorts its results file.

    Raises:
        ValueError: if the folder holds results of another model, other data or another seed, or of another policy of
            the same name, if another run uses it, or if it is a file.
        PermissionError: if this user cannot write it.
    """
    watch = watch or Silent()
    check_folder(out, overwrite=True)
    out.mkdir(parents=True, exist_ok=True)
    check_results(out)
    with Records(out / RESULTS, watch.say) as records, _timings(out / TIMINGS, watch.say) as timings:
        check_policies(plan, records.texts, out)
        write_header(plan, out, records.asked)
        refused, failed, planned = plan.errors(), dict[Key, Line](), plan.keys()
        records.append(refused)
        before = sum(key in records for key in planned)
        watch.begin(len(planned) - before)
        tasks = [
            Task(i, sweep.refilled, tuple((batch, sweep.cells) for batch in sweep.batches)).without(records)
            for i, sweep in enumerate(plan.sweeps)
        ]
        for part in work([task for task in tasks if task.asked], watch.say):
            watch.cell(part.cell)
            failed |= {key_of(line): line for line in part.lines if "error" in line}
            new = sum(key_of(line) not in records for line in part.lines)
            records.append(part.lines)
            if part.timing is not None:
                timings.write(encoded(part.timing))
                timings.flush()
            watch.advance(new)
        records.finish([*map(key_of, refused), *planned], plan.settles)
        after = sum(key in records for key in planned)
    return Summary(after, len(planned), after - before, tuple(map(sentence, [*refused, *failed.values()])))


def _timings(path: Path, say: Callable[[str], None]) -> BinaryIO:
    """Opens the timings file to append to it, after the lines that a kill left incomplete are dropped."""
    repaired(path, read_timing, say, "its times are lost")
    return path.open("ab")

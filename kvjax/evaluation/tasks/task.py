"""The interface of tasks: contexts, the questions of each context, and the metric that marks the answers.

A prompt is `context + question.text`, in the benchmark's own words. A policy compresses the context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvjax.checks import shown
from kvjax.evaluation.judge import Judge


class DataError(ValueError):
    """A data file that cannot be used. The message names the file and, if they are known, the line and the field."""


@dataclass(frozen=True)
class Question:
    """One question about a context.

    Attributes:
        text: the text between the context and the answer.
        answers: the reference answers.
        opening: the end of `text` that already belongs to the answer; empty if there is none. A chat template puts it
            into the assistant's turn.
        meta: facts about the question, which are recorded in the results.
    """

    text: str
    answers: tuple[str, ...]
    opening: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("an empty question: expected a text of at least one character")
        if not self.text.endswith(self.opening):
            raise ValueError(
                f"question {shown(self.text)}: expected a text that ends with its opening {shown(self.opening)}"
            )


@dataclass(frozen=True)
class Example:
    """A context and its questions, each of which is answered independently.

    Attributes:
        id: an id that is stable and unique within the task.
        context: the text that a policy compresses.
        questions: the questions, at least one.
        meta: facts such as length, depth and language, which are recorded in the results.
        omitted: a notice that replaces the part of the context that is cut out of a prompt that is too long.
        new_tokens: the largest number of tokens of an answer; the task's own number by default.
    """

    id: str
    context: str
    questions: tuple[Question, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    omitted: str = ""
    new_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.context or not self.questions:
            raise ValueError(f"example {self.id} has no {'questions' if self.context else 'context'}: expected both")


@dataclass(frozen=True)
class Fault:
    """Replaces an example that cannot be asked. It is reported and has no score."""

    id: str
    reason: str


Scores = Mapping[str, float]
Metric = Callable[[str, Question], Scores]
"""Maps (prediction, question) to scores in [0, 1]. The first score is the headline; scores may be missing."""


def mean_scores(scores: Sequence[Scores]) -> dict[str, float]:
    """The mean of each score, over the answers that have this score."""
    names = dict.fromkeys(name for one in scores for name in one)
    having = {name: [one[name] for one in scores if name in one] for name in names}
    return {name: sum(values) / len(values) for name, values in having.items()}


@dataclass(frozen=True)
class Source:
    """The source of a task's examples.

    Attributes:
        tokenizer: the model's tokenizer (transformers), which measures generated texts.
        length: the number of tokens of a generated prompt, as the benchmark defines it. Tasks that are read from files
            ignore it.
        seed: the seed of generated tasks. Example i depends only on the seed, the task, the length and i.
        count: the number of examples of a generated task.
        folder: the folder of data files, as docs/guide/evaluation_tasks.md lists them; None downloads a benchmark that
            is on the hub.
    """

    tokenizer: Any = None
    length: int | None = None
    seed: int = 0
    count: int = 500
    folder: Path | None = None

    def needed_length(self, task: str) -> int:
        """The length in tokens; raises ValueError if it is None."""
        if self.length is None:
            raise ValueError(f"length=None of the generated task {task}: expected a length in tokens")
        return self.length

    def ids(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens; raises ValueError if there is no tokenizer."""
        if self.tokenizer is None:
            raise ValueError("tokenizer=None of a task that counts tokens: expected the model's tokenizer")
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def tokens(self, text: str) -> int:
        """The number of tokens of `text`, without special tokens."""
        return len(self.ids(text))


@dataclass(frozen=True)
class Task(ABC):
    """A task: its examples and its metric.

    Attributes:
        name: family/task.
        new_tokens: the largest number of tokens of an answer in the benchmark.
        metric: marks one answer.
        generated: whether the examples are generated, `Source.count` of them at `Source.length`, or read from files.
        truncation: the treatment of a prompt that is too long: "refuse" refuses it, "middle" cuts tokens out of the
            middle of the prompt, and "end" cuts them off the end of the context.
        chat: whether a run with chat templates applies one; some benchmarks exclude some tasks.
        varied: whether answers are long and differ much in length, so that a batch of them would mostly wait for its
            longest one. Runs then refill the rows.
        shown: whether a page of results may show a whole prompt, because kvjax or the user has written its text.
    """

    name: str
    new_tokens: int
    metric: Metric
    generated: bool = False
    truncation: Literal["refuse", "middle", "end"] = "refuse"
    chat: bool = True
    varied: bool = False
    shown: bool = False

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Returns what answers depend on beside the name, such as a checksum. A run continues with the same only."""
        return {}

    @property
    def factors(self) -> tuple[str, ...]:
        """Scores, if the headline is the geometric mean of their means; empty if it is the mean of the first score."""
        return ()

    @abstractmethod
    def examples(self, source: Source) -> Iterator[Example | Fault]:
        """All examples, in a fixed order. A line of a file that cannot be used becomes a Fault.

        Raises:
            DataError: if a file is missing or cannot be read.
            ValueError: if the source lacks a length or tokenizer that this task needs.
        """

    def judged_by(self, judge: Judge) -> Task:
        """This task with a metric that asks a judge, if the benchmark uses one; otherwise the task itself."""
        return self

    def overall(self, scores: Sequence[Scores]) -> dict[str, float]:
        """The scores of the task, from the scores of all its answers. Intervals of the headline follow `factors`."""
        return mean_scores(scores)

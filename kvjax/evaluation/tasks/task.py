"""What a task is: contexts, the questions asked of each, and how an answer is marked. Not how a model is asked.

A prompt is `context + question.text`, the benchmark's own strings: the context is what a policy compresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvjax.evaluation.judge import Judge


class DataError(ValueError):
    """A data file that cannot be used: the message names the file and, where there is one, the line and the field."""


@dataclass(frozen=True)
class Question:
    """One question to a context.

    Attributes:
        text: what follows the context, up to where the model goes on.
        answers: the references.
        opening: the end of `text` that already belongs to the answer, if any; a chat template puts it into the
            assistant's turn.
        meta: what results keep of it.
    """

    text: str
    answers: tuple[str, ...]
    opening: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("a question is empty; it must have something for the model to read after the context")
        if not self.text.endswith(self.opening):
            raise ValueError(f"the question must end with its opening {self.opening!r}; it is {self.text!r}")


@dataclass(frozen=True)
class Example:
    """A context and its questions, each asked alone.

    Attributes:
        id: stable, and unique within its task.
        meta: length, depth, language and the like, for results.
        omitted: stands where a part of the context is cut out because it is too long.
    """

    id: str
    context: str
    questions: tuple[Question, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    omitted: str = ""

    def __post_init__(self) -> None:
        if not self.context or not self.questions:
            raise ValueError(f"example {self.id}: it has no {'questions' if self.context else 'context'}")


@dataclass(frozen=True)
class Fault:
    """Stands where an example would: it cannot be asked. It is reported, and not scored."""

    id: str
    reason: str


Scores = Mapping[str, float]
Metric = Callable[[str, Question], Scores]
"""(prediction, question) -> scores in [0, 1], the first one the headline; one that does not apply is left out."""


@dataclass(frozen=True)
class Source:
    """Where examples come from.

    Attributes:
        tokenizer: of the model (transformers); generated texts are measured with it.
        length: tokens of a generated prompt, in the benchmark's own sense; tasks that are read from files have theirs.
        seed: of generated tasks. Example i depends on the seed, the task and i alone.
        count: examples of a generated task.
        folder: real data, as docs/evaluation.md lists them; None for the hub, where a benchmark is there.
    """

    tokenizer: Any = None
    length: int | None = None
    seed: int = 0
    count: int = 500
    folder: Path | None = None

    def needed_length(self, task: str) -> int:
        """`length`; raises ValueError without one."""
        if self.length is None:
            raise ValueError(f"{task} is generated and needs a length in tokens")
        return self.length

    def ids(self, text: str) -> list[int]:
        """The tokens of `text`, without special ones; raises ValueError without a tokenizer."""
        if self.tokenizer is None:
            raise ValueError("the task measures texts in tokens and needs the model's tokenizer")
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def tokens(self, text: str) -> int:
        """How many tokens `text` has, as `ids`."""
        return len(self.ids(text))


@dataclass(frozen=True)
class Task(ABC):
    """Examples and their marking.

    Attributes:
        name: family/task.
        new_tokens: the benchmark's generation length.
        metric: marks one answer.
        generated: made at any `Source.length`, `Source.count` of them; other tasks are read from files.
        truncation: what becomes of a prompt longer than the model: "refuse" it, or cut tokens out of its "middle" or at
            the "end" of its context.
        chat: whether a chat template is applied where one is asked for; some benchmarks leave it out for some tasks.
    """

    name: str
    new_tokens: int
    metric: Metric
    generated: bool = False
    truncation: Literal["refuse", "middle", "end"] = "refuse"
    chat: bool = True

    @abstractmethod
    def examples(self, source: Source) -> Iterator[Example | Fault]:
        """All examples, in a fixed order.

        Raises:
            DataError: files that are missing or cannot be read at all; a bad line in one is a Fault.
            ValueError: a source that lacks what this task needs.
        """

    def judged_by(self, judge: Judge) -> Task:
        """This task with a metric that asks a judge too, where the benchmark has one do the marking."""
        return self

    def overall(self, scores: Sequence[Scores]) -> dict[str, float]:
        """The task's scores from those of all its answers: the mean of each, over the answers that have it."""
        names = dict.fromkeys(name for one in scores for name in one)
        having = {name: [one[name] for one in scores if name in one] for name in names}
        return {name: sum(values) / len(values) for name, values in having.items()}

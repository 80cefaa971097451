"""Mathematical problems that are solved step by step: GSM8K (arXiv 2110.14168), MATH-500 (arXiv 2305.20050), AIME 2024.

The prompt and the number of tokens are those of QwenLM/Qwen2.5-Math for chat models (`qwen-boxed`, zero-shot), and so
is the final answer: the last box. Of an answer to GSM8K without a box, it is the number after ####, as the data set
writes it, or else the last number, as in the flexible match of lm-evaluation-harness. math-verify compares a box with
the reference of MATH-500 and AIME, as in lighteval.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from kvjax.evaluation import equality, metrics

from .files import DataFile, Record, examples
from .task import DataError, Example, Fault, Question, Scores, Source, Task

INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
KINDS = ("subject", "level")  # of a problem of MATH

BRACES = re.compile(r"\\(?:boxed|fbox)\s*(?:(?P<box>\{)|(?P<bare>[^\s{}$\\]+))|\\.|[{}]", re.DOTALL)
NUMBER = re.compile(
    r"(?<!\d)(?<![A-Za-z}]\^)(?<![A-Za-z}]\^\{)"  # the exponent of a unit is no number
    r"(?:(?<![\w)}])-)?"  # a minus after an operand subtracts
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
)


def last_box(text: str) -> str | None:
    """The content of the last \\boxed{...} whose braces are balanced, in time linear in the text; None without one.

    An answer that the limit of tokens cuts off within a box has the box before it. "\\boxed 5" is a box too.
    """
    opened: list[int | None] = []  # positions after the braces of boxes; None for other braces
    last, content = -1, None
    for token in BRACES.finditer(text):
        if token["bare"]:
            last, content = token.start(), token["bare"]
        elif token["box"]:
            opened.append(token.end())
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            begin = opened.pop()
            if begin is not None and begin > last:
                last, content = begin, text[begin : token.start()]
    return None if content is None else re.sub(r"(?<!\\right)\.$", "", content.strip())


def numbers(text: str) -> list[Decimal]:
    """The decimal numbers of a text, without the commas and LaTeX spaces between thousands, and currency signs."""
    plain = re.sub(r"\\[!, ]|\\?\$", "", text.replace("{,}", ","))
    return [Decimal(number.replace(",", "")) for number in NUMBER.findall(plain)]


def numeric(prediction: str, question: Question) -> Scores:
    """1 if the final number is the reference; `answered` says whether a box or #### marks it."""
    box, (_, marked, after) = last_box(prediction) or "", prediction.rpartition("####")
    found = numbers(box)[-1:] or (numbers(after)[:1] if marked else [])
    final = found or numbers(prediction)[-1:]
    return _scores(final == numbers(question.answers[0]), bool(found), prediction)


def boxed(prediction: str, question: Question) -> Scores:
    """1 if the last box equals the reference; `answered` says whether there is one."""
    box = last_box(prediction)
    return _scores(bool(box) and equality.equal(str(box), question.answers[0]), bool(box), prediction)


def _scores(right: bool, answered: bool, prediction: str) -> Scores:
    """Both, and the repetition rate of ten consecutive words, if there are ten."""
    scores = {"exact_match": float(right), "answered": float(answered)}
    repeated = metrics.repetition(prediction, 10)
    return scores if repeated is None else scores | {"repetition": repeated}


@dataclass(frozen=True, kw_only=True)
class MathTask(Task):
    """Problems. Each is a context, and the instruction to solve it is its question."""

    file: DataFile

    def examples(self, source: Source) -> Iterator[Example | Fault]:
        return examples(self.file.lines(source), self._example)

    def _example(self, record: Record) -> Example:
        problem, answer = self.problem(record)
        meta = {name: record.fields[name] for name in KINDS if name in record.fields}
        return Example(record.where.rsplit(" ", 1)[1], problem, (Question(INSTRUCTION, (answer,)),), meta)

    @abstractmethod
    def problem(self, record: Record) -> tuple[str, str]:
        """The problem of a line, and its final answer. Raises DataError."""


@dataclass(frozen=True, kw_only=True)
class NumericTask(MathTask):
    """GSM8K, whose solutions end with #### and an integer."""

    def problem(self, record: Record) -> tuple[str, str]:
        solution = record.text("answer")
        _, marked, answer = solution.rpartition("####")
        if not marked or len(numbers(answer)) != 1:
            raise DataError(f"{record.where}: field 'answer' ends with {solution[-40:]!r}; expected #### and a number")
        return record.text("question"), answer.strip()


@dataclass(frozen=True, kw_only=True)
class BoxedTask(MathTask):
    """MATH-500 and AIME, whose answers are LaTeX."""

    def examples(self, source: Source) -> Iterator[Example | Fault]:
        equality.check_installed()  # before answers that nothing could mark
        return super().examples(source)

    def problem(self, record: Record) -> tuple[str, str]:
        return record.text("problem"), record.text("answer").strip()


NEW_TOKENS = 2_048
TASKS = (
    NumericTask(
        name="math/gsm8k", new_tokens=NEW_TOKENS, metric=numeric, varied=True, file=DataFile("gsm8k/test.jsonl")
    ),
    BoxedTask(
        name="math/math500",
        new_tokens=NEW_TOKENS,
        metric=boxed,
        varied=True,
        file=DataFile("math500/test.jsonl", "HuggingFaceH4/MATH-500"),
    ),
    BoxedTask(name="math/aime24", new_tokens=NEW_TOKENS, metric=boxed, varied=True, file=DataFile("aime24/test.jsonl")),
)

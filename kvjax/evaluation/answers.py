"""Asking a model and marking what it answers: one policy, one batch of examples, exact match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Int

from kvjax.generate import Generation, Stats, generate
from kvjax.models import Decoder
from kvjax.policy import Policy


class Example(Protocol):
    """A prompt and the answer that must follow, int32 ids."""

    @property
    def prompt(self) -> Int[np.ndarray, "P"]: ...

    @property
    def answer(self) -> Int[np.ndarray, "A"]: ...


@dataclass(frozen=True)
class Answers:
    """What a model answered under a policy.

    Attributes:
        answers: the ids each row wrote before an end token.
        correct: the rows that wrote exactly the expected answer, and ended it.
        stats: of the one call of `generate` that answered all rows.
    """

    answers: list[Int[np.ndarray, "_"]]
    correct: Bool[np.ndarray, "B"]
    stats: Stats

    @classmethod
    def marked(cls, examples: Sequence[Example], out: Generation, end_token: int) -> Answers:
        """What `generate` made of the examples' questions."""
        answers, correct = [], []
        for example, tokens in zip(examples, out.tokens, strict=True):
            ends = np.flatnonzero(tokens == end_token)
            answers.append(tokens[: ends[0]] if ends.size else tokens)
            correct.append(ends.size > 0 and np.array_equal(answers[-1], example.answer))
        return cls(answers, np.array(correct), out.stats)

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())


def answer(
    params: Decoder, examples: Sequence[Example], policy: Policy, *, end_token: int, new_tokens: int = 32
) -> Answers:
    """Answers all examples as one batch, greedily, and marks them by exact match.

    Every row decodes `new_tokens` tokens wherever its answer ends, so that the speeds of policies compare.

    Raises:
        ValueError: where an expected answer and its end token do not fit into `new_tokens`; as `generate` otherwise.
    """
    longest = max((example.answer.size for example in examples), default=0) + 1
    if longest > new_tokens:
        raise ValueError(f"new_tokens={new_tokens}; the longest expected answer needs {longest}")
    out = generate(params, [example.prompt for example in examples], policy=policy, max_new_tokens=new_tokens, eos=())
    return Answers.marked(examples, out, end_token)

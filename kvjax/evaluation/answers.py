"""Answers one batch of the demo's examples under one policy and marks the answers by exact match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from kvjax.evaluation.tasks.demo import DemoExample
from kvjax.generate import Stats, generate
from kvjax.models import Decoder
from kvjax.policy import Policy


@dataclass(frozen=True)
class MarkedAnswers:
    """The marked answers of a batch of B examples under one policy.

    Attributes:
        answers: the ids that each row generated before its first end token.
        correct: whether a row generated exactly the expected answer and then an end token.
        stats: statistics of the one call of `generate` that answered all rows.
    """

    answers: list[Int[np.ndarray, "_"]]
    correct: Bool[np.ndarray, "B"]
    stats: Stats

    @property
    def accuracy(self) -> float:
        """The share of correct rows, from 0 to 1."""
        return float(self.correct.mean())


def answer(
    params: Decoder, examples: Sequence[DemoExample], policy: Policy, *, end_token: int, new_tokens: int = 32
) -> MarkedAnswers:
    """Answers all examples as one batch with greedy decoding and marks them by exact match.

    Every row decodes `new_tokens` tokens, even after its end token. The decoding speeds of policies are therefore
    comparable.

    Args:
        end_token: the id that ends an answer.
        new_tokens: the number of tokens that every row decodes.

    Raises:
        ValueError: if `new_tokens` is too small for an expected answer and its end token, and as `generate` does.
    """
    longest = max((example.answer.size for example in examples), default=0) + 1
    if longest > new_tokens:
        raise ValueError(
            f"new_tokens={new_tokens}: expected an integer >= {longest}, the longest expected answer and its end token"
        )
    out = generate(params, [example.prompt for example in examples], policy=policy, max_new_tokens=new_tokens, eos=())
    answers, correct = [], []
    for example, tokens in zip(examples, out.tokens, strict=True):
        ends = np.flatnonzero(tokens == end_token)
        answers.append(tokens[: ends[0]] if ends.size else tokens)
        correct.append(ends.size > 0 and np.array_equal(answers[-1], example.answer))
    return MarkedAnswers(answers, np.array(correct), out.stats)

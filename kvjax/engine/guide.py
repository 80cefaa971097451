"""Guides: the host's part in the drawing of a request's tokens."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.checks import check_truth, is_finite, is_integer, shown
from kvjax.decoding.grammars import Grammar, GrammarError, Grammars, Matcher
from kvjax.decoding.row_guides import TOP, RowGuides

BIASES = 300  # of a request, at most
LARGEST = 1e6  # of a number that is added to a logit


@dataclass(frozen=True)
class Guide:
    """The host's part in the drawing of a request's tokens. Numbers are added to logits before the sampler's steps.

    While a row has a guide, every program takes one step, and the host has seen all tokens before it starts the next.

    Attributes:
        grammar: the answer follows it, and ends when it is complete.
        logit_bias: numbers that are added to the logits of tokens, at most 300.
        frequency_penalty: is subtracted from the logit of a token for each time that the answer has it.
        presence_penalty: is subtracted from the logits of tokens that the answer has.
        top_log_probs: the number of tokens, from 0 to 20, whose log-probabilities come with each token.
        echo: the answer begins with the prompt but for its first token, so that its tokens have log-probabilities. They
            are decoded one by one, from the cache as the policy leaves it, and count towards the engine's limit.

    Raises:
        ValueError: an attribute is not accepted; the message names it.
    """

    grammar: Grammar | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    top_log_probs: int = 0
    echo: bool = False

    def __post_init__(self) -> None:
        for name in ("frequency_penalty", "presence_penalty"):
            if not _is_number(value := getattr(self, name)):
                raise ValueError(f"{name}={shown(value)}: expected a number from -{LARGEST:g} to {LARGEST:g}")
        top = self.top_log_probs
        if not is_integer(top) or not 0 <= top <= TOP:
            raise ValueError(f"top_log_probs={shown(top)}: expected an integer from 0 to {TOP}")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ValueError(f"grammar={shown(self.grammar)}: expected a Grammar, or None")
        check_truth("echo", self.echo)
        bias = self.logit_bias
        if not isinstance(bias, Mapping) or len(bias) > BIASES or not all(map(_is_number, bias.values())):
            expected = f"at most {BIASES} numbers by token id, each from -{LARGEST:g} to {LARGEST:g}"
            raise ValueError(f"logit_bias={shown(bias)}: expected {expected}")

    @property
    def changes_nothing(self) -> bool:
        """Returns whether a request needs no guide."""
        return self == Guide()


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and is_finite(value) and abs(float(value)) <= LARGEST


class Guided:
    """The guide of one answer while it comes. The loop alone changes it.

    Attributes:
        top: the number of tokens whose log-probabilities are reported.
    """

    def __init__(
        self,
        guide: Guide,
        grammars: Grammars,
        vocab_size: int,
        ends: frozenset[int],
        forced: Int[np.ndarray, "N"],
    ) -> None:
        """At the beginning of an answer.

        Args:
            guide: what the request asks for.
            grammars: compiles the grammar.
            vocab_size: the number of tokens.
            ends: the tokens that end the answer.
            forced: the tokens that it begins with.

        Raises:
            ValueError: the grammar or a token is not accepted.
        """
        if (ending := ends.intersection(forced.tolist())) and guide.echo:
            raise ValueError(f"echo=True and the prompt has the end token {min(ending)}: expected eos=()")
        self._forced = deque(forced.tolist())
        for token in guide.logit_bias:
            if not is_integer(token) or not 0 <= token < vocab_size:
                raise ValueError(f"logit_bias has the token {shown(token)}: expected ids in 0 .. {vocab_size - 1}")
        self.top = guide.top_log_probs
        self._guide, self._ends = guide, ends
        self._matcher: Matcher | None = None
        if guide.grammar is not None:
            self._matcher = grammars.matcher(guide.grammar, ends)
        self._counts: Counter[int] = Counter()

    def write(self, guides: RowGuides, row: int) -> None:
        """Writes what may come next into a row of NumPy arrays. Raises GrammarError if nothing may."""
        if self._forced:
            guides.allowed[row] = 0
            guides.allowed[row, self._forced[0] // 32] = np.uint32(1 << self._forced[0] % 32)
        elif self._matcher is not None:
            guides.allowed[row] = self._matcher.allowed()
        guide, biases = self._guide, dict(self._guide.logit_bias)
        if guide.frequency_penalty or guide.presence_penalty:
            for token, count in self._counts.items():
                lost = guide.frequency_penalty * count + guide.presence_penalty
                biases[token] = biases.get(token, 0.0) - lost
        guides.ids[row, : len(biases)] = list(biases)
        guides.biases[row, : len(biases)] = np.fromiter(biases.values(), float, len(biases)).astype(np.float32)

    def take(self, token: int) -> bool:
        """Goes on with a token. Returns whether the grammar allows nothing after it."""
        if self._forced:
            if token != (forced := self._forced.popleft()):
                raise GrammarError(f"the prompt has the token {forced}, which the model never draws: expected no echo")
            return False
        self._counts[token] += 1
        return self._matcher is not None and token not in self._ends and self._matcher.take(token)

"""Texts for DuoAttention's gates: pass keys at random places of a text, and their recital at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from kvjax.evaluation.tasks.vocabulary import NAMES, THINGS
from kvjax.files.texts import Stream

KEYS = 10  # per text


@dataclass(frozen=True)
class Wording:
    """The sentences that state and recite pass keys. `{name}` and `{key}` stand for what a text draws.

    Attributes:
        names: what has a pass key.
        keys: the pass keys.
        statement: of one pass key.
        question: what precedes the recital.
        cue: what precedes each answer.
        answer: recites one pass key.
    """

    names: Sequence[str]
    keys: Sequence[str | int]
    statement: str
    question: str
    cue: str
    answer: str


ENGLISH = Wording(
    names=(
        *("apple", "bread", "chair", "cloud", "drum", "eagle", "fence", "glass", "horse", "island", "jar", "kite"),
        *("lamp", "moon"),
    ),
    keys=range(10_000, 100_000),
    statement=" The pass key of the {name} is {key}.",
    question="\n\nWhat are the pass keys?\n\n",
    cue="",
    answer=" The pass key of the {name} is {key}.",
)
DEMO = Wording(  # in the words of the demo model, which knows no others
    names=NAMES,
    keys=THINGS,
    statement="the code of {name} is {key} .",
    question="",
    cue="recall what the code of {name} is :",
    answer="{name} is {key} .",
)
WORDINGS = (ENGLISH, DEMO)  # the first one that a tokenizer can write is used


def wording_of(tokenizer: Any) -> Wording:
    """The wording that a tokenizer can write.

    Raises:
        ValueError: it can write none.
    """
    for wording in WORDINGS:
        if all(_writes(tokenizer, text) for text in _examples(wording)):
            return wording
    first = ENGLISH.statement.strip().format(name=ENGLISH.names[0], key=ENGLISH.keys[0])
    raise ValueError(
        f"the tokenizer does not know the words of the pass keys: expected one that encodes and decodes {first!r}"
    )


def _examples(wording: Wording) -> list[str]:
    """Each name and as many keys in all sentences."""
    pairs = zip(wording.names, wording.keys, strict=False)
    forms = (wording.statement, wording.question, wording.cue, wording.answer)
    return [form.format(name=name, key=key) for name, key in pairs for form in forms]


def _writes(tokenizer: Any, text: str) -> bool:
    """Returns whether a text is the same after encoding and decoding, apart from spaces."""
    return "".join(tokenizer.decode(_encoded(tokenizer, text)).split()) == "".join(text.split())


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class PassKeys:
    """The pass keys of a text, in tokens.

    Attributes:
        statements: one per pass key.
        recital: the question, and the answers in another order than the statements.
        recited: which tokens of the recital are answers.
    """

    statements: tuple[Int[np.ndarray, "_"], ...]
    recital: Int[np.ndarray, "R"]
    recited: Bool[np.ndarray, "R"]

    @classmethod
    def drawn(cls, wording: Wording, tokenizer: Any, rng: np.random.Generator) -> PassKeys:
        """Draws names and keys, none of them twice."""
        names, keys = (rng.choice(len(drawn), KEYS, replace=False) for drawn in (wording.names, wording.keys))
        pairs = [{"name": wording.names[i], "key": wording.keys[j]} for i, j in zip(names, keys, strict=True)]

        def encoded(text: str) -> Int[np.ndarray, "_"]:
            return np.array(_encoded(tokenizer, text), np.int32)

        parts, recited = [encoded(wording.question)], [False]
        for i in rng.permutation(KEYS):
            parts += [encoded(form.format(**pairs[i])) for form in (wording.cue, wording.answer)]
            recited += [False, True]
        return cls(
            tuple(encoded(wording.statement.format(**pair)) for pair in pairs),
            np.concatenate(parts),
            np.repeat(recited, [len(part) for part in parts]),
        )

    @property
    def size(self) -> int:
        """The number of tokens of all statements and the recital."""
        return sum(map(len, self.statements)) + len(self.recital)

    def woven(
        self, stream: Stream, length: int, rng: np.random.Generator
    ) -> tuple[Int[np.ndarray, "N"], Bool[np.ndarray, "N"]]:
        """A window of a stream with the statements at random places, and the recital; and which tokens are answers.

        Args:
            stream: the texts.
            length: the number of tokens, N.
            rng: draws the window and the places.
        """
        (window,) = stream.windows(1, length - self.size, rng)
        places = np.sort(rng.integers(len(stream.begin), len(window) + 1, len(self.statements)))
        first, *others = np.split(window, places)
        parts = [first]
        for statement, part in zip(self.statements, others, strict=True):
            parts += [statement, part]
        tokens = np.concatenate([*parts, self.recital])
        return tokens, np.pad(self.recited, (length - len(self.recited), 0))

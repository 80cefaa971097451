"""Synthetic tasks in plain words: facts are scattered over a text, and a question at its end asks about them.

The question is unknown while the text is read, and the facts may be anywhere in it. A small cache therefore gives the
right answer only if it retained the right tokens. An answer begins by repeating words of the question, so the fact is
retrieved during decoding, from the retained entries. The last token of the prompt, which attends to the whole prompt
during prefill, does not retrieve it.
Every task supports any length that holds its facts. A text can be read once and asked all its questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from kvjax.checks import did_you_mean, shown

from .vocabulary import ADJECTIVES, CLASSES, LABELS, NAMES, NOUNS, THINGS, VERBS, encode

SHORTEST_FILLER, LONGEST_FILLER = 4, 8


@dataclass(frozen=True)
class DemoQuestion:
    """A question and its expected answer, in words."""

    text: str
    answer: str


@dataclass(frozen=True)
class Facts:
    """The statements of a text, in order, and all questions that they answer."""

    statements: list[str]
    questions: list[DemoQuestion]


class Deck:
    """Deals names and things without repetition, so that the facts of one text never contradict each other."""

    def __init__(self, rng: np.random.Generator):
        self._cards = {"names": list(rng.permutation(NAMES)), "things": list(rng.permutation(THINGS))}

    def _deal(self, kind: str, count: int) -> list[str]:
        cards = self._cards[kind]
        if count > len(cards):
            raise ValueError(f"{count} {kind} requested, but {len(cards)} are left: expected fewer tasks per text")
        self._cards[kind] = cards[count:]
        return cards[:count]

    def names(self, count: int) -> list[str]:
        """Deals `count` names. Raises ValueError if fewer are left."""
        return self._deal("names", count)

    def things(self, count: int) -> list[str]:
        """Deals `count` things. Raises ValueError if fewer are left."""
        return self._deal("things", count)


@dataclass(frozen=True)
class Document:
    """A text of N tokens and its (question, answer) pairs, all int32 ids; each question is asked on its own."""

    context: Int[np.ndarray, "N"]
    questions: tuple[tuple[Int[np.ndarray, "Q"], Int[np.ndarray, "A"]], ...]


@dataclass(frozen=True)
class DemoExample:
    """A prompt, which is `context` followed by `question`, and its expected answer, all int32 ids."""

    context: Int[np.ndarray, "N"]
    question: Int[np.ndarray, "Q"]
    answer: Int[np.ndarray, "A"]

    @property
    def prompt(self) -> Int[np.ndarray, "P"]:
        """The context and the question as one array."""
        return np.concatenate([self.context, self.question])


def codes(count: int, deck: Deck) -> tuple[list[str], list[str], list[str]]:
    """Draws `count` names, a code for each name, and the statements that give the codes."""
    names, things = deck.names(count), deck.things(count)
    return names, things, [f"the code of {name} is {thing} ." for name, thing in zip(names, things, strict=True)]


def needle(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    """The text has one fact, and the question asks for it."""
    (name,), (thing,), statements = codes(1, deck)
    return Facts(statements, [DemoQuestion(f"recall what the code of {name} is :", f"{name} is {thing}")])


def needles(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    """The text has four facts, and a question asks for two of them."""
    names, things, statements = codes(4, deck)
    questions = [
        DemoQuestion(
            f"recall what the codes of {names[i]} and {names[j]} are :",
            f"{names[i]} is {things[i]} and {names[j]} is {things[j]}",
        )
        for i in range(4)
        for j in range(4)
        if i != j
    ]
    return Facts(statements, questions)


def keys(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    """The text has one fact per 32 tokens, 48 at most, and a question asks for one of them."""
    names, things, statements = codes(min(max(length // 32, 3), 48), deck)
    questions = [
        DemoQuestion(f"recall what the code of {name} is :", f"{name} is {thing}")
        for name, thing in zip(names, things, strict=True)
    ]
    return Facts(statements, questions)


def variables(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    """The text has chains of three assignments, and the answer follows one chain to its value."""
    chains = min(max(length // 128, 2), 8)
    names, things = deck.names(3 * chains), deck.things(chains)
    statements: list[list[str]] = []
    questions = []
    for chain in range(chains):
        first, second, third = names[3 * chain : 3 * chain + 3]
        statements.append(
            [f"{first} equals {things[chain]} .", f"{second} equals {first} .", f"{third} equals {second} ."]
        )
        questions.append(
            DemoQuestion(
                f"recall what {third} equals :", f"{third} equals {second} equals {first} equals {things[chain]}"
            )
        )
    turns = rng.permutation(np.repeat(np.arange(chains), 3))
    return Facts([statements[chain].pop(0) for chain in turns], questions)


def labels(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    """The text labels classes of words by examples, and the answer labels a word, which may be new."""
    examples = min(max(length // 32, 8), 48)
    names_of = dict(zip(CLASSES, rng.permutation(LABELS)[: len(CLASSES)], strict=True))
    order = rng.permutation(np.arange(examples) % len(CLASSES))
    kinds = list(CLASSES)
    # Every class occurs at least twice.
    statements = [f"{rng.choice(CLASSES[kinds[k]])} means {names_of[kinds[k]]} ." for k in order]
    questions = [
        DemoQuestion(f"recall what {word} means :", f"{word} means {names_of[kind]}")
        for kind, words in CLASSES.items()
        for word in words
    ]
    return Facts(statements, questions)


def copying(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    """The text has lines of four words, and the answer repeats one line."""
    lines = min(max(length // 128, 2), 12)
    names = deck.names(lines)
    said = [" ".join(deck.things(4)) for _ in names]
    return Facts(
        [f"{name} says {words} ." for name, words in zip(names, said, strict=True)],
        [
            DemoQuestion(f"recall what {name} says :", f"{name} says {words}")
            for name, words in zip(names, said, strict=True)
        ],
    )


def frequent(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    """The text has votes for three things. The answer is the one with three times as many votes as the others."""
    most = min(max(length // 128, 3), 12)
    winner, *others = deck.things(3)
    votes = [winner] * most + [other for other in others for _ in range(most // 3)]
    statements = [f"one vote for {thing} ." for thing in rng.permutation(votes)]
    return Facts(statements, [DemoQuestion("recall what most votes are for :", f"for {winner}")])


TASKS: dict[str, Callable[[int, np.random.Generator, Deck], Facts]] = {
    facts.__name__: facts for facts in (needle, needles, keys, variables, labels, copying, frequent)
}
"""By the name of a task, what draws the facts of a text of so many tokens."""


def filler(length: int, rng: np.random.Generator) -> list[str]:
    """Sentences without facts that have `length` words in total; `length` is 0 or at least SHORTEST_FILLER."""
    sentences = []
    while length:
        size = int(rng.integers(SHORTEST_FILLER, min(LONGEST_FILLER, length) + 1))
        if 0 < length - size < SHORTEST_FILLER:  # the rest must be empty or long enough for a sentence
            size = length if length <= LONGEST_FILLER else length - SHORTEST_FILLER
            size = min(size, LONGEST_FILLER)
        sentences.append(sentence(size, rng))
        length -= size
    return sentences


def sentence(size: int, rng: np.random.Generator) -> str:
    """A random sentence of `size` words, 4 to 8, including the full stop."""

    def pick(words: Sequence[str]) -> str:
        return words[int(rng.integers(len(words)))]

    subject = f"{pick(ADJECTIVES)} {pick(NOUNS)}" if size in (5, 7, 8) else pick(NOUNS)
    if size < 6:
        return f"the {subject} {pick(VERBS)} ."
    object_ = f"{pick(ADJECTIVES)} {pick(NOUNS)}" if size == 8 else pick(NOUNS)
    return f"the {subject} {pick(VERBS)} the {object_} ."


def weave(statements: Sequence[str], length: int, rng: np.random.Generator) -> Int[np.ndarray, "N"]:
    """A text of exactly `length` tokens with the statements, in order, at random places among filler sentences.

    Raises:
        ValueError: if the statements and one filler sentence do not fit.
    """
    stated = sum(len(statement.split()) for statement in statements)
    if length - stated < SHORTEST_FILLER:
        raise ValueError(f"a text of {length} tokens: expected at least {stated + SHORTEST_FILLER} for these facts")
    around = filler(length - stated, rng)
    places = rng.permutation(np.arange(len(around) + len(statements)) < len(statements))
    facts, rest = iter(statements), iter(around)
    return encode(" ".join(next(facts if place else rest) for place in places))


def document(task: str, length: int, rng: np.random.Generator) -> Document:
    """A text and all its questions. The context and any one question have exactly `length` tokens together.

    Raises:
        ValueError: if the task is unknown or if its facts do not fit into `length` tokens.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {shown(task)}: expected one of {', '.join(TASKS)}{did_you_mean(task, TASKS)}")
    facts = TASKS[task](length, rng, Deck(rng))
    questions = [(encode(question.text), encode(question.answer)) for question in facts.questions]
    context = weave(facts.statements, length - len(questions[0][0]), rng)  # a task's questions have one length
    return Document(context, tuple(questions))


def example(task: str, length: int, rng: np.random.Generator) -> DemoExample:
    """A prompt of exactly `length` tokens with one random question of its text. Raises as `document` does."""
    text = document(task, length, rng)
    question, answer = text.questions[int(rng.integers(len(text.questions)))]
    return DemoExample(text.context, question, answer)

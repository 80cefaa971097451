"""Synthetic tasks in plain words: facts strewn over a text, and a question about them at its end.

What is asked is not known while the text is read, and the facts lie anywhere in it, so a small cache answers only if
it kept the right tokens. An answer opens by repeating what is asked: so the fact is fetched while decoding, from what a
policy kept of the prompt, and not by the prompt's last token, which still saw all of it.
Every task can be of any length; a text can be read once and asked all of its questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from .vocabulary import ADJECTIVES, CLASSES, LABELS, NAMES, NOUNS, THINGS, VERBS, encode

SHORTEST_FILLER, LONGEST_FILLER = 4, 8


@dataclass(frozen=True)
class Question:
    """The words that ask, and the words that must follow."""

    text: str
    answer: str


@dataclass(frozen=True)
class Facts:
    """What a text states, in order, and every question that it answers."""

    statements: list[str]
    questions: list[Question]


class Deck:
    """Names and things, dealt without repetition, so that facts of one text never contradict each other."""

    def __init__(self, rng: np.random.Generator):
        self._cards = {"names": list(rng.permutation(NAMES)), "things": list(rng.permutation(THINGS))}

    def _deal(self, kind: str, count: int) -> list[str]:
        cards = self._cards[kind]
        if count > len(cards):
            raise ValueError(f"a text asks for {count} more {kind} where {len(cards)} are left; combine fewer tasks")
        self._cards[kind] = cards[count:]
        return cards[:count]

    def names(self, count: int) -> list[str]:
        return self._deal("names", count)

    def things(self, count: int) -> list[str]:
        return self._deal("things", count)


@dataclass(frozen=True)
class Task:
    """A kind of text and question.

    Attributes:
        summary: what it takes to answer, in one line.
        facts: draws the facts of a text of `length` tokens.
    """

    name: str
    summary: str
    facts: Callable[[int, np.random.Generator, Deck], Facts]


@dataclass(frozen=True)
class Document:
    """A text, int32 ids, and the questions that it answers: (question ids, answer ids), each to be asked alone."""

    context: Int[np.ndarray, "N"]
    questions: tuple[tuple[Int[np.ndarray, "Q"], Int[np.ndarray, "A"]], ...]


@dataclass(frozen=True)
class Example:
    """One prompt, `context` and then `question`, and the answer that must follow, all int32 ids."""

    context: Int[np.ndarray, "N"]
    question: Int[np.ndarray, "Q"]
    answer: Int[np.ndarray, "A"]

    @property
    def prompt(self) -> Int[np.ndarray, "P"]:
        return np.concatenate([self.context, self.question])


def codes(count: int, deck: Deck) -> tuple[list[str], list[str], list[str]]:
    names, things = deck.names(count), deck.things(count)
    return names, things, [f"the code of {name} is {thing} ." for name, thing in zip(names, things, strict=True)]


def needle(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    (name,), (thing,), statements = codes(1, deck)
    return Facts(statements, [Question(f"recall what the code of {name} is :", f"{name} is {thing}")])


def needles(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    names, things, statements = codes(4, deck)
    questions = [
        Question(
            f"recall what the codes of {names[i]} and {names[j]} are :",
            f"{names[i]} is {things[i]} and {names[j]} is {things[j]}",
        )
        for i in range(4)
        for j in range(4)
        if i != j
    ]
    return Facts(statements, questions)


def keys(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    names, things, statements = codes(min(max(length // 32, 3), 48), deck)
    questions = [
        Question(f"recall what the code of {name} is :", f"{name} is {thing}")
        for name, thing in zip(names, things, strict=True)
    ]
    return Facts(statements, questions)


def variables(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
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
            Question(f"recall what {third} equals :", f"{third} equals {second} equals {first} equals {things[chain]}")
        )
    turns = rng.permutation(np.repeat(np.arange(chains), 3))
    return Facts([statements[chain].pop(0) for chain in turns], questions)


def labels(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    shown = min(max(length // 32, 8), 48)
    names_of = dict(zip(CLASSES, rng.permutation(LABELS)[: len(CLASSES)], strict=True))
    order = rng.permutation(np.arange(shown) % len(CLASSES))
    kinds = list(CLASSES)
    statements = [
        f"{rng.choice(CLASSES[kinds[k]])} means {names_of[kinds[k]]} ." for k in order
    ]  # every class is shown at least twice
    questions = [
        Question(f"recall what {word} means :", f"{word} means {names_of[kind]}")
        for kind, words in CLASSES.items()
        for word in words
    ]
    return Facts(statements, questions)


def copying(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    lines = min(max(length // 128, 2), 12)
    names = deck.names(lines)
    said = [" ".join(deck.things(4)) for _ in names]
    return Facts(
        [f"{name} says {words} ." for name, words in zip(names, said, strict=True)],
        [
            Question(f"recall what {name} says :", f"{name} says {words}")
            for name, words in zip(names, said, strict=True)
        ],
    )


def frequent(length: int, rng: np.random.Generator, deck: Deck) -> Facts:
    most = min(max(length // 128, 3), 12)
    winner, *others = deck.things(3)
    votes = [winner] * most + [other for other in others for _ in range(most // 3)]
    statements = [f"one vote for {thing} ." for thing in rng.permutation(votes)]
    return Facts(statements, [Question("recall what most votes are for :", f"for {winner}")])


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("needle", "one fact in the text, and it is asked for", needle),
        Task("needles", "four facts, of which two are asked for", needles),
        Task("keys", "one fact in every 32 tokens (48 at most), of which one is asked for", keys),
        Task("variables", "chains of three assignments; the asked one is followed to its value", variables),
        Task("labels", "classes of words get labels by example; a word, seen or not, is to be labelled", labels),
        Task("copying", "lines of four words; one line is to be repeated", copying),
        Task(
            "frequent", "votes for three things; the one with the most votes, thrice the next, is asked for", frequent
        ),
    )
}


def filler(length: int, rng: np.random.Generator) -> list[str]:
    """Sentences about nothing that is asked, `length` words in all; `length` is 0 or at least SHORTEST_FILLER."""
    sentences = []
    while length:
        longest = min(LONGEST_FILLER, length)
        size = int(rng.integers(SHORTEST_FILLER, longest + 1))
        if 0 < length - size < SHORTEST_FILLER:  # what is left must fit a sentence, or none
            size = length if length <= LONGEST_FILLER else length - SHORTEST_FILLER
            size = min(size, LONGEST_FILLER)
        sentences.append(sentence(size, rng))
        length -= size
    return sentences


def sentence(size: int, rng: np.random.Generator) -> str:
    """A sentence of 4 to 8 words, the full stop included."""

    def pick(words: Sequence[str]) -> str:
        return words[int(rng.integers(len(words)))]

    subject = f"{pick(ADJECTIVES)} {pick(NOUNS)}" if size in (5, 7, 8) else pick(NOUNS)
    if size < 6:
        return f"the {subject} {pick(VERBS)} ."
    object_ = f"{pick(ADJECTIVES)} {pick(NOUNS)}" if size == 8 else pick(NOUNS)
    return f"the {subject} {pick(VERBS)} the {object_} ."


def weave(statements: Sequence[str], length: int, rng: np.random.Generator) -> Int[np.ndarray, "N"]:
    """A text of exactly `length` tokens: the statements, in order, at random places among filler sentences.

    Raises ValueError if there is no room for the statements and at least one filler sentence.
    """
    stated = sum(len(statement.split()) for statement in statements)
    if length - stated < SHORTEST_FILLER:
        raise ValueError(f"a text of {length} tokens is too short for these facts: at least {stated + SHORTEST_FILLER}")
    around = filler(length - stated, rng)
    places = rng.permutation(np.arange(len(around) + len(statements)) < len(statements))
    facts, rest = iter(statements), iter(around)
    return encode(" ".join(next(facts if place else rest) for place in places))


def document(task: str, length: int, rng: np.random.Generator) -> Document:
    """A text and all of its questions: the context and any one question are exactly `length` tokens together.

    Raises:
        ValueError: an unknown task, or a length that cannot hold the task's facts.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; accepted: {', '.join(TASKS)}")
    facts = TASKS[task].facts(length, rng, Deck(rng))
    questions = [(encode(question.text), encode(question.answer)) for question in facts.questions]
    context = weave(facts.statements, length - len(questions[0][0]), rng)  # a task's questions are equally long
    return Document(context, tuple(questions))


def example(task: str, length: int, rng: np.random.Generator) -> Example:
    """A prompt of exactly `length` tokens with one of its text's questions. Raises as `document`."""
    text = document(task, length, rng)
    question, answer = text.questions[int(rng.integers(len(text.questions)))]
    return Example(text.context, question, answer)

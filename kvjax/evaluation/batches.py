"""Groups prompts into batches by bucketed length, in a fixed order, so that few programs are compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvjax.cache import bucket
from kvjax.evaluation.entries import Setting
from kvjax.evaluation.items import Ids, Item


@dataclass(frozen=True)
class Ask:
    """One question of an item, split at the point where the prompt is compressed.

    Attributes:
        item: the item that the question belongs to.
        index: the index of the question within the item.
        tail: the ids that follow the compressed prompt: the whole question, or only its last token.
        lead: the ids that are read between the prompt and the compression. A policy sees them when it compresses.
    """

    item: Item
    index: int
    tail: Ids
    lead: Ids = field(default_factory=partial(np.zeros, 0, np.int32))


@dataclass(frozen=True)
class Reading:
    """A prompt that is prefilled once, and the questions that its cache answers."""

    prompt: Ids
    asks: tuple[Ask, ...]

    @property
    def new_tokens(self) -> int:
        """The largest number of tokens of an answer."""
        return self.asks[0].item.new_tokens

    @property
    def size(self) -> int:
        """The length of the prompt, rounded up to its bucket."""
        return bucket(self.prompt.size)

    @property
    def longest(self) -> tuple[int, int]:
        """The most tokens that a question has before the compression, and after it."""
        return max(ask.lead.size for ask in self.asks), max(ask.tail.size for ask in self.asks)

    @property
    def refilled(self) -> bool:
        """Returns whether rows are refilled as the answers end."""
        return self.asks[0].item.refilled


@dataclass(frozen=True)
class ReadingBatch:
    """Readings of equal shape that run together. The last one is repeated if there are fewer than `rows`."""

    readings: tuple[Reading, ...]
    rows: int

    @property
    def refilled(self) -> bool:
        """Returns whether rows are refilled as the answers end."""
        return self.readings[0].refilled


def readings(items: Iterable[Item], question: Setting, whole: bool = False) -> list[Reading]:
    """Splits each item into the prompt that is compressed and the tokens that follow it.

    In the setting "after", the context is compressed and each question follows as a later turn. In "before", the
    context and the question are compressed together, except for the last token of the question. In both settings, the
    first token of an answer is therefore decoded from the retained entries.

    A context with several questions becomes one reading. In "before" this needs a prompt that can be read in two
    parts.

    Args:
        question: the setting.
        whole: whether each prompt must be read in one part, because a policy replays it or because RoPE depends on its
            length. Each question then has a reading of its own in "before".
    """
    made = []
    for item in items:
        if question == "after":
            asks = tuple(Ask(item, i, ids) for i, ids in enumerate(item.questions))
            made.append(Reading(item.context, asks))
        elif not whole and len(item.questions) > 1 and all(ids.size > 1 for ids in item.questions):
            asks = tuple(Ask(item, i, ids[-1:], ids[:-1]) for i, ids in enumerate(item.questions))
            made.append(Reading(item.context, asks))
        else:
            for i, ids in enumerate(item.questions):
                prompt = np.concatenate([item.context, ids])
                made.append(Reading(prompt[:-1], (Ask(item, i, prompt[-1:]),)))
    return made


def batches(made: Sequence[Reading], most: Callable[[Reading], int], multiple: int = 1) -> list[ReadingBatch]:
    """Groups readings of equal shape into batches, the longest first.

    If a batch does not fit into memory, the run finds out at its start.

    Args:
        most: returns the largest number of rows of a batch that consists of such readings.
        multiple: the number of rows of a batch is a multiple of this.
    """
    groups: dict[tuple[int, ...], list[Reading]] = {}
    of_size: Counter[int] = Counter()
    for reading in made:
        lead, tail = map(power_of_two, reading.longest)
        read_in_two = reading.asks[0].lead.size > 0
        key = (reading.size, read_in_two, lead, tail, len(reading.asks), reading.new_tokens, reading.refilled)
        groups.setdefault(key, []).append(reading)
        of_size[reading.size] += 1
    found = []
    for (size, *_), group in sorted(groups.items(), key=lambda pair: pair[0], reverse=True):
        enough = power_of_two(of_size[size])  # counted over all groups of a size, so that they share programs
        rows = -(-min(most(group[0]), enough) // multiple) * multiple
        found += [ReadingBatch(tuple(group[i : i + rows]), rows) for i in range(0, len(group), rows)]
    return found


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n; 0 for 0. Questions of other lengths are in one batch then."""
    return 1 << (n - 1).bit_length() if n else 0


def halves(batch: ReadingBatch, multiple: int = 1) -> tuple[ReadingBatch, ...]:
    """Splits a batch into batches with half as many readings and half the rows, if that is still a multiple."""
    rows = max(batch.rows // 2 // multiple * multiple, multiple)
    size = min(rows, -(-len(batch.readings) // 2))
    return tuple(ReadingBatch(batch.readings[i : i + size], rows) for i in range(0, len(batch.readings), size))

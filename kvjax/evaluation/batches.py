"""What is read together: prompts of a bucket of lengths, so that few programs serve all, in an order that is fixed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvjax.evaluation.grid import Setting
from kvjax.evaluation.items import Ids, Item
from kvjax.extend import bucket


@dataclass(frozen=True)
class Ask:
    """One question of an item.

    Attributes:
        index: of the question among the item's.
        tail: what follows the compressed prompt: the question, or its last token alone.
        lead: what is still read before the prompt is compressed: the rest of a question that policies are to see.
    """

    item: Item
    index: int
    tail: Ids
    lead: Ids = field(default_factory=partial(np.zeros, 0, np.int32))


@dataclass(frozen=True)
class Reading:
    """A prompt that is read once, and what is asked of its cache."""

    prompt: Ids
    asks: tuple[Ask, ...]

    @property
    def new_tokens(self) -> int:
        return self.asks[0].item.new_tokens

    @property
    def size(self) -> int:
        return bucket(self.prompt.size)


@dataclass(frozen=True)
class Batch:
    """Readings of equal shape. `rows` of them are run, the last one again where there are fewer."""

    readings: tuple[Reading, ...]
    rows: int


def readings(items: Iterable[Item], question: Setting, whole: bool = False) -> list[Reading]:
    """What is compressed, and what comes after it, in a setting.

    "after": the context is compressed, and each question comes as a later turn. "before": context and question are one
    prompt, but for its last token. So in both the first token of an answer is decoded from what was kept. A context
    with several questions is read once in both, unless a `whole` prompt must be read at once: where a policy replays
    it, or rotations depend on its length.
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


def batches(made: Sequence[Reading], most: Callable[[Reading], int], multiple: int = 1) -> list[Batch]:
    """The readings in batches, the longest first, which is where memory runs out if it does.

    Args:
        most: rows of a batch of readings like this one.
        multiple: that rows must be a multiple of.
    """
    groups: dict[tuple[int, ...], list[Reading]] = {}
    of_size: Counter[int] = Counter()
    for reading in made:
        lead, tail = (
            bucket(max(sizes)) for sizes in zip(*((a.lead.size, a.tail.size) for a in reading.asks), strict=True)
        )
        read_in_two = reading.asks[0].lead.size > 0
        key = (reading.size, read_in_two, lead, tail, len(reading.asks), reading.new_tokens)
        groups.setdefault(key, []).append(reading)
        of_size[reading.size] += 1
    found = []
    for (size, *_), group in sorted(groups.items(), key=lambda pair: pair[0], reverse=True):
        rows = min(most(group[0]), _power(of_size[size]))  # of all groups of a size, so that they share programs
        rows = -(-rows // multiple) * multiple
        found += [Batch(tuple(group[i : i + rows]), rows) for i in range(0, len(group), rows)]
    return found


def halves(batch: Batch, multiple: int = 1) -> tuple[Batch, ...]:
    """The same readings in batches of half as many, and of half the rows where that is still a multiple."""
    rows = max(batch.rows // 2 // multiple * multiple, multiple)
    size = min(rows, -(-len(batch.readings) // 2))
    return tuple(Batch(batch.readings[i : i + size], rows) for i in range(0, len(batch.readings), size))


def _power(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()

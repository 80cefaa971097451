"""A policy: four parts, what they protect, and how often decoding evicts. All of it is static data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import UNLIMITED, FromKeys, Slots, Values
from kvjax.pallas_kernels import Stored

from .budget import Budget, most_entries
from .learned import LearnedTokens
from .merge import Drop, Merge
from .part import Part, check_choice, check_integer, check_kind, check_truths, named
from .score import LayerShape, Moment, Score
from .select import Ranked, Select, TopTokens
from .shares import share_of
from .storage import PLAIN, Storage


@dataclass(frozen=True)
class Protect(Part):
    """Entries that are never evicted: the first `sinks` positions and the most recent ones.

    Attributes:
        sinks: the number of first positions.
        recent: the number of most recent tokens, or a float in [0, 1) for that share of the head's capacity.
    """

    sinks: int = 0
    recent: int | float = 0

    def __post_init__(self) -> None:
        check_integer("sinks", self.sinks, least=0)
        if not isinstance(self.recent, float):
            check_integer("recent", self.recent, least=0)
        elif not 0 <= self.recent < 1:
            raise ValueError(
                f"recent={self.recent}: expected an integer >= 0, or a float in [0, 1) for a share of the budget"
            )

    def minimum(self, room: int) -> int:
        """Returns the smallest capacity that leaves `room` entries unprotected, where no share is rounded down."""
        if isinstance(self.recent, float):
            return math.ceil((self.sinks + room) / (1 - self.recent) - 1e-9)
        return self.sinks + self.recent + room

    def mask(
        self, positions: Int[Array, "B H M"], next_position: Int[Array, "B"], capacity: Int[Array, "B H"]
    ) -> Bool[Array, "B H M"]:
        """Returns True for the entries that must stay when the token at `next_position` comes in next."""
        recent = jnp.asarray(share_of(self.recent, capacity) if isinstance(self.recent, float) else self.recent)
        oldest = next_position[:, None] - recent
        return (positions >= 0) & ((positions < self.sinks) | (positions >= oldest[..., None]))


class Limits(NamedTuple):
    """The limits of a policy's budget on some layers, each by its place among them.

    Attributes:
        limited: whether a layer has a budget at all.
        evicts: whether decoding evicts from it. If not, the layer grows with the answer.
    """

    limited: tuple[bool, ...]
    evicts: tuple[bool, ...]

    def of_layers(self, first: int, count: int) -> Limits:
        """Returns the limits of some layers."""
        some = slice(first, first + count)
        return Limits(self.limited[some], self.evicts[some])


@dataclass(frozen=True)
class Policy:
    """Decides what a cache retains.

    Attributes:
        score: how much each entry matters.
        budget: the number of entries that each layer retains.
        select: which entries fill the budget; by default those of the highest scores.
        merge: what becomes of the others; by default they are dropped.
        protect: the entries that are never evicted.
        every: the number of entries that a full head evicts at a time while decoding; its occupancy then moves between
            the budget and `every` - 1 below it. None: only the prompt is compressed, and the answer is added to it.
        positions: "original" keeps RoPE at each token's own position. "in_cache" rotates keys to their place among the
            retained entries (StreamingLLM), for which they are cached before rotation.
        storage: the form in which keys and values are held. Parts always see arrays.
        learned: learned tokens whose entries take a part of the budget; None for none.
    """

    score: Score
    budget: Budget
    select: Select = TopTokens()
    merge: Merge = Drop()
    protect: Protect = Protect()
    every: int | None = None
    positions: Literal["original", "in_cache"] = "original"
    storage: Storage = PLAIN
    learned: LearnedTokens | None = None

    def __post_init__(self) -> None:
        kinds: dict[str, type] = {"score": Score, "budget": Budget, "select": Select, "merge": Merge}
        kinds |= {"protect": Protect, "storage": Storage}
        if self.learned is not None:
            kinds["learned"] = LearnedTokens
        for name, kind in kinds.items():
            check_kind(name, getattr(self, name), kind)
        if self.every is not None:
            check_integer("every", self.every, least=1)
        check_choice("positions", self.positions, "original", "in_cache")
        needs = self.score.needs
        if self.positions == "in_cache" and needs.keeps_queries and self.every is not None:
            raise ValueError(
                f"the score {_name(self.score)} keeps rotated queries, whose scores are exact only while keys keep "
                f"their rotation; with every={self.every} it cannot be combined with positions='in_cache'"
            )
        if self.allocates and self.positions == "in_cache":
            raise ValueError(
                f"the budget {_name(self.budget)} stores heads in segments of different lengths, which have no places "
                "to rotate to; it cannot be combined with positions='in_cache'"
            )
        if self.merge.effects.keys and self.every is not None and needs.keeps_queries:
            raise ValueError(
                f"the score {_name(self.score)} keeps rotated queries, whose scores are exact only while keys do not "
                f"change, and the merge {_name(self.merge)} changes them; with every={self.every} they cannot be "
                "combined"
            )
        for part in filter(None, (self.score, self.budget, self.select, self.merge, self.storage, self.learned)):
            with named(_name(part)):
                check_truths(part)
                part.check(self)
        smallest = self.budget.smallest
        if smallest is not None and smallest < self.minimum:
            given = {"sinks": self.protect.sinks, "recent": self.protect.recent, "every": self.every}
            given["learned"] = self.learned_count
            terms = [f"{name}={value}" for name, value in given.items() if value] + ["1"] * (self.every is None)
            raise ValueError(
                f"a budget of {smallest} entries: expected {self.minimum} or more, which is {' + '.join(terms)}"
            )

    @property
    def allocates(self) -> bool:
        """Tells whether the budget is allocated to layers and heads by scores, once all layers have read a prompt."""
        return self.budget.layout is not None

    @property
    def asks_the_end(self) -> bool:
        """Tells whether the last queries of a prompt decide what stays of it, so that a question must end it."""
        return self.score.needs.asks_the_end or self.storage.newest is not None

    @property
    def piecewise(self) -> bool:
        """Tells whether a decode step can judge each head's entries a piece at a time."""
        return self.score.needs.slotwise and not self.merge.effects.at_steps

    @property
    def changes_entries(self) -> bool:
        """Tells whether keys or values change once they are cached, so that neither follows from the other."""
        effects = self.merge.effects
        return effects.merges or effects.keys or self.storage.newest is not None

    @property
    def ignores_size(self) -> bool:
        """Tells whether a compression retains the same entries if there is room for more than the budget."""
        return self.select.compares == "scores" and not self.merge.effects.at_prompt

    @property
    def minimum(self) -> int:
        """The smallest capacity a row may have: the learned and protected entries and those that a step evicts."""
        return self.protect.minimum(self.every or 1) + self.learned_count

    @property
    def learned_count(self) -> int:
        """The number of learned tokens, 0 without any."""
        return 0 if self.learned is None else self.learned.count

    def limited(self, layer: int) -> bool:
        """Returns whether a layer has a budget at all."""
        return most_entries(self.budget, layer, 1, layer + 1) is not None

    def evicts(self, layer: int, layers: int) -> bool:
        """Returns whether decoding evicts from one of the model's `layers`. If not, the layer grows with the answer."""
        layout = self.budget.layout
        dense = layout is not None and layout.is_dense(layer, layers)
        return self.every is not None and self.limited(layer) and not dense

    def limits(self, layers: int) -> Limits:
        """Returns the limits of each of the model's `layers`."""
        each = range(layers)
        return Limits(tuple(map(self.limited, each)), tuple(self.evicts(i, layers) for i in each))

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"]:
        """Returns the entries per kv head of each row in one of the model's `layers`, at least `minimum`.

        Lengths may be NumPy or JAX arrays; the result is of the same kind.
        """
        use = np if isinstance(prompt_lengths, np.ndarray) else jnp
        capacity = self.budget.capacity(layer, prompt_lengths, layers)
        if capacity is None:
            return use.full(prompt_lengths.shape, UNLIMITED, np.int32)
        return use.maximum(capacity, self.minimum)

    def rise(self, tokens: int) -> int:
        """Returns how many more slots than now a head that evicts may occupy after that many more tokens."""
        pace = self.budget.pace
        return 0 if pace is None else math.ceil(pace * tokens) + (self.every or 1) - 1

    def longest(self, slots: int) -> int:
        """Returns the most tokens that a row may have while its heads that evict fit into `slots`."""
        pace = self.budget.pace
        return UNLIMITED if pace is None else ((slots + 1) * pace.denominator - 1) // pace.numerator

    def renewed(self, entries: Slots, length: Int[Array, "B"]) -> Slots:
        """Returns entries with the capacity of rows with `length` tokens, if the budget rises with the answer."""
        if self.budget.pace is None:
            return entries
        capacity = self.capacity(0, length, 1)
        return replace(entries, capacity=jnp.broadcast_to(capacity[:, None], entries.capacity.shape))

    def slots(self, layer: int, prompt_size: int, layers: int) -> int | None:
        """Returns the most entries that a compressed layer retains of prompts up to a size; None if it retains all."""
        slots = most_entries(self.budget, layer, prompt_size, layers)
        return None if slots is None else max(slots, self.minimum)

    def store(self, k: Float[Array, "*tokens D"], v: Float[Array, "*tokens D"], like: Values) -> tuple[Stored, Values]:
        """Returns the stored form of keys and values, as entries have it whose stored values are `like`."""
        return self.storage.store(k), like if isinstance(like, FromKeys) else self.storage.store(v)

    def with_state(self, entries: Slots, shape: LayerShape, *, limited: bool) -> Slots:
        """Adds the initial state of the storage to a layer's entries, and of score and merge if it is limited."""
        shape = shape._replace(slots=entries.slots)
        entries = replace(entries, storing=self.storage.init(shape))
        if not limited:
            return entries
        per_slot, per_row = self.score.init(shape)
        return replace(entries, per_slot=per_slot, per_row=per_row, merging=self.merge.init(shape))

    def rank(
        self, entries: Slots, moment: Moment, counts: Int[Array, "B H"] | None, *, raised: bool = True
    ) -> Float[Array, "B H M"]:
        """Returns scores, -inf for empty slots.

        What is not finite counts as the lowest number, or as the largest if it is +inf: an entry is no empty slot for
        its score, and one that is not protected can be evicted.

        Args:
            counts: the number of entries that each head retains; None while that is still to be allocated.
            raised: whether protected entries score +inf.
        """
        protected = self._protected(entries, moment)
        scores = self.score(entries.plain(), moment._replace(protected=protected, counts=counts))
        number = jnp.finfo(jnp.float32)
        scores = jnp.where(jnp.isnan(scores), number.min, jnp.clip(scores, number.min, number.max))
        if raised:
            scores = jnp.where(protected, jnp.inf, scores)
        return jnp.where(entries.positions >= 0, scores, -jnp.inf)

    def compress(self, entries: Slots, moment: Moment, size: int, met: Float[Array, "B H M D"] | None = None) -> Slots:
        """Retains the budget of each head, at most `size` entries, in order of position if the entries are.

        Args:
            met: the keys as queries saw them, where a score that keeps these queries must not see the cached ones.
        """
        entries = self.renewed(entries, moment.next_position)
        counts = jnp.minimum(entries.capacity, size)
        scored = entries if met is None else replace(entries, keys=met)
        return self.retain(entries, moment, self.rank(scored, moment, counts), size)

    def retain(self, entries: Slots, moment: Moment, scores: Float[Array, "B H M"], size: int) -> Slots:
        """Retains the best entries of each head by `rank`: as many as its capacity, and at most `size`."""

        def keep(ranked: Ranked) -> Int[Array, "B H size"]:
            scores = jnp.where(ranked.positions >= 0, ranked.scores, -jnp.inf)
            return self.select.keep(ranked._replace(scores=scores))

        before, counts = entries.plain(), jnp.minimum(entries.capacity, size)
        ranked = Ranked(scores, before.positions, counts, size, moment.heads, before)
        after, kept = self.merge.compress(before, moment, ranked, keep)
        return entries.updated(before, after).gather(kept)

    def expendable(self, entries: Slots, moment: Moment) -> Float[Array, "B H S"]:
        """Returns scores for eviction while decoding: +inf for protected entries and for empty slots."""
        moment = moment._replace(leaving=self.every or 0)
        scores = self.rank(entries, moment, jnp.minimum(entries.capacity, entries.slots))
        return jnp.where(entries.positions < 0, jnp.inf, scores)

    def release(self, entries: Slots, moment: Moment, lost: Bool[Array, "B H S"], count: int) -> Slots:
        """Returns the entries without those that are lost, `count` of a head or none, after the merge has seen them."""
        if self.merge.effects.at_steps:
            before, protected = entries.plain(), self._protected(entries, moment)
            moment = moment._replace(protected=protected, leaving=count)
            scores = self.rank(entries, moment, jnp.minimum(entries.capacity, entries.slots), raised=False)
            after, lost = self.merge.absorb(before, moment, scores, lost, count)
            entries = entries.updated(before, after)
        return replace(entries, positions=jnp.where(lost, -1, entries.positions))

    def _protected(self, entries: Slots, moment: Moment) -> Bool[Array, "B H M"]:
        return self.protect.mask(entries.positions, moment.next_position, entries.capacity)


def _name(part: Any) -> str:
    return type(part).__name__

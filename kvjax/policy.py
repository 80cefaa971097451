"""A policy is four parts and two numbers: what it keeps of the past, and when it lets go. All of it is static data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.protocols import (
    AS_THEY_ARE,
    UNLIMITED,
    Budget,
    LayerShape,
    Merge,
    Moment,
    Score,
    Select,
    SharedBudget,
    Storage,
    check_integer,
)

if TYPE_CHECKING:
    from kvjax.cache import LayerCache


@dataclass(frozen=True)
class Protect:
    """Entries that are never evicted: the first `sinks` positions and the most recent ones.

    Attributes:
        recent: a number of tokens, or a float: that share of the row's capacity.
    """

    sinks: int = 0
    recent: int | float = 0

    def __post_init__(self) -> None:
        check_integer("sinks", self.sinks, least=0)
        if not isinstance(self.recent, float):
            check_integer("recent", self.recent, least=0)
        elif not 0 <= self.recent < 1:
            raise ValueError(
                f"recent={self.recent}: accepted are an integer >= 0 or, for a share of the budget, a float in [0, 1)"
            )

    def minimum(self, room: int) -> int:
        """The smallest capacity that leaves `room` entries unprotected."""
        if isinstance(self.recent, float):
            return math.ceil((self.sinks + room) / (1 - self.recent) - 1e-9)
        return self.sinks + self.recent + room

    def mask(
        self, positions: Int[Array, "B H M"], next_position: Int[Array, "B"], capacity: Int[Array, "B H"]
    ) -> Bool[Array, "B H M"]:
        """True for the entries that must stay when the token at `next_position` is about to come in."""
        recent = jnp.asarray(
            jnp.floor(capacity * self.recent + 1e-4).astype(jnp.int32)
            if isinstance(self.recent, float)
            else self.recent
        )
        oldest = next_position[:, None] - recent
        return (positions >= 0) & ((positions < self.sinks) | (positions >= oldest[..., None]))


@dataclass(frozen=True)
class Policy:
    """What a cache keeps.

    Attributes:
        score: how much each entry matters.
        budget: how many entries each layer keeps.
        select: which entries fill the budget.
        merge: what becomes of the rest.
        protect: the entries that are never evicted.
        every: evict while decoding, so many entries at a time; the occupancy then swings between the budget and
            `every` - 1 below it. None: compress the prompt only, and let the answer come on top.
        positions: RoPE at a token's "original" position, or at its place among the entries kept ("in_cache", as
            StreamingLLM has it), in which case keys are cached before rotation.
        storage: how keys and values are held. Parts are shown arrays, whatever it is.
    """

    score: Score
    budget: Budget
    select: Select
    merge: Merge
    protect: Protect = Protect()
    every: int | None = None
    positions: Literal["original", "in_cache"] = "original"
    storage: Storage = AS_THEY_ARE

    def __post_init__(self) -> None:
        if self.every is not None:
            check_integer("every", self.every, least=1)
        if self.positions not in ("original", "in_cache"):
            raise ValueError(f"positions={self.positions!r}: accepted are 'original' and 'in_cache'")
        if self.positions == "in_cache" and self.score.stores_queries:
            raise ValueError(
                f"{type(self.score).__name__} stores rotated queries, whose scores are exact only while keys keep "
                "their rotation; it cannot be combined with positions='in_cache'"
            )
        if self.shares and self.positions == "in_cache":
            raise ValueError(
                f"{type(self.budget).__name__} makes segments of different lengths, in which no place in the cache is "
                "counted; it cannot be combined with positions='in_cache'"
            )
        if self.merge.changes_keys and self.every is not None and self.score.stores_queries:
            raise ValueError(
                f"{type(self.score).__name__} stores rotated queries, whose scores are exact only while keys do not "
                f"change, and {type(self.merge).__name__} changes them; with every={self.every} they cannot be combined"
            )
        self.score.check(self)
        self.merge.check(self)
        smallest = self.budget.smallest
        if smallest is not None and smallest < self.minimum:
            raise ValueError(
                f"a budget of {smallest} entries is smaller than sinks + recent + {self.every or 1} = {self.minimum} "
                f"({self.protect}); accepted is a budget of {self.minimum} or more"
            )

    @property
    def shares(self) -> bool:
        """Whether what layers and heads keep is decided for each prompt, once all layers have read it."""
        return isinstance(self.budget, SharedBudget)

    @property
    def piecewise(self) -> bool:
        """Whether a step looks at no more of a head's entries than a piece at a time."""
        return self.score.slotwise and not self.merge.absorbs

    def evicts(self, layer: int, layers: int) -> bool:
        """Whether decoding evicts from one of the model's `layers`, whose budget is shared."""
        assert isinstance(self.budget, SharedBudget)
        return self.every is not None and not self.budget.dense(layer, layers)

    @property
    def minimum(self) -> int:
        """The smallest capacity a row may have: what is protected and what a step evicts."""
        return self.protect.minimum(self.every or 1)

    def limited(self, layer: int) -> bool:
        """Whether a layer has a budget at all."""
        return self.budget.slots(layer, 1, layer + 1) is not None

    def grows(self, layer: int) -> bool:
        """Whether decoding adds entries to a layer for as long as it goes on."""
        return self.every is None or not self.limited(layer)

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"]:
        """Entries a kv head of each row keeps in one of the model's `layers`, raised to what is protected."""
        capacity = self.budget.capacity(layer, prompt_lengths, layers)
        if capacity is None:
            return jnp.full(prompt_lengths.shape, UNLIMITED, jnp.int32)
        return jnp.maximum(capacity, self.minimum)

    def slots(self, layer: int, prompt_size: int, layers: int) -> int | None:
        """The most entries a compressed layer keeps of prompts up to a static size; None if it keeps everything."""
        slots = self.budget.slots(layer, prompt_size, layers)
        return None if slots is None else max(slots, self.minimum)

    def init_state(self, layer: int, shape: LayerShape) -> tuple[Any, Any]:
        """The score's state for a layer without slots."""
        if not self.limited(layer):
            return None, None
        return self.score.init_slots(shape, 0), self.score.init_rows(shape)

    def compress(self, entries: LayerCache, moment: Moment, size: int) -> LayerCache:
        """Keeps each head's budget of entries, at most `size`, in order of position if the entries are."""
        return self.retain(entries, moment, self.rank(entries, moment), size)

    def rank(self, entries: LayerCache, moment: Moment, *, raised: bool = True) -> Float[Array, "B H M"]:
        """Scores that are +inf for the protected entries, unless not `raised`, and -inf where there is none."""
        protected = self.protect.mask(entries.positions, moment.next_position, entries.capacity)
        scores = self.score(entries.plain(), moment._replace(protected=protected))
        if raised:
            scores = jnp.where(protected, jnp.inf, scores)
        return jnp.where(entries.positions >= 0, scores, -jnp.inf)

    def retain(self, entries: LayerCache, moment: Moment, scores: Float[Array, "B H M"], size: int) -> LayerCache:
        """Each head's best entries, as many as its capacity and at most `size`."""
        shown = entries.plain()
        counts = jnp.minimum(entries.capacity, size)
        entries = entries.updated(shown, self.merge.condense(shown, moment, scores, counts, size))
        scores = jnp.where(entries.positions >= 0, scores, -jnp.inf)
        kept = self.select.keep(scores, entries.positions, counts, size, moment.heads)
        shown = entries.plain()
        return entries.updated(shown, self.merge.absorb_rest(shown, moment, kept)).gather(kept)

    def expendable(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H S"]:
        """Scores that are +inf for what cannot be evicted: the protected entries and empty slots."""
        return jnp.where(entries.positions < 0, jnp.inf, self.rank(entries, moment))

    def make_room(self, entries: LayerCache, moment: Moment, incoming: Bool[Array, "B"]) -> LayerCache:
        """Evicts `every` entries of each head that is full, in the rows that have a token coming in."""
        assert self.every is not None
        count = self.every
        full = (entries.occupancy >= entries.capacity) & incoming[:, None]

        def judge() -> Bool[Array, "B H S"]:
            scores = self.expendable(entries, moment)
            return full[..., None] & mark(self.select.victims(scores, entries.positions, count), entries.slots)

        if count == 1:
            lost = judge()
        else:  # nothing of the cache's size may leave a cond: its keys and values would be copied
            lost = jax.lax.cond(jnp.any(full), judge, lambda: jnp.zeros(entries.positions.shape, bool))
        return self.release(entries, moment, lost, count)

    def release(self, entries: LayerCache, moment: Moment, lost: Bool[Array, "B H S"], count: int) -> LayerCache:
        """The entries without those that are lost, `count` a head or none, which merge into others."""
        shown = entries.plain()
        entries = entries.updated(shown, self.merge.absorb(shown, moment, lost, count))
        return replace(entries, positions=jnp.where(lost, -1, entries.positions))


def mark(index: Int[Array, "B H K"], size: int) -> Bool[Array, "B H size"]:
    """True at the given indices, those outside of 0 .. size - 1 being ignored."""
    b, h = jnp.arange(index.shape[0])[:, None, None], jnp.arange(index.shape[1])[:, None]
    unmarked = jnp.zeros((*index.shape[:2], size), bool)
    return unmarked.at[b, h, jnp.where(index < 0, size, index)].set(True, mode="drop")

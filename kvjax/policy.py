"""A policy is four parts and two numbers: what it keeps of the past, and when it lets go. All of it is static data.

A part is a frozen dataclass, so a policy hashes and is a static argument of `jax.jit`; what changes from step to step
lives in the cache, as state per slot and per row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.heads import ALL_HEADS, Heads
from kvjax.models import AttentionLayer
from kvjax.pallas_kernels import Reduction

if TYPE_CHECKING:
    from kvjax.cache import LayerCache
    from kvjax.quantized import Stored

UNLIMITED = 2**30  # a capacity that no prompt reaches


def check_integer(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` is an integer of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: accepted is an integer >= {least}")


class LayerShape(NamedTuple):
    """The sizes a part may need to lay out its state."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: jnp.dtype


@dataclass(frozen=True)
class Attended:
    """What an attention step shows to the policy: W queries have just attended to M entries.

    Attributes:
        queries: as they met the keys.
        unrotated: the same queries before RoPE.
        positions: of the queries, ascending, -1 for padding, which is on the left.
        lse: log-sum-exp of each query's scaled logits.
        received: what each entry received, reduced as the score asked, or None if it did not ask.
        lengths: real queries in each row.
        scale: of the logits.
        window: the layer's sliding window.
        heads: those that the queries and entries belong to. On a mesh it is through them that a score reaches others.
        layer: its index.
        decoding: whether the queries are of tokens decoded one by one, not of a text that is read.
    """

    queries: Float[Array, "B Hq W D"]
    unrotated: Float[Array, "B Hq W D"]
    positions: Int[Array, "B W"]
    lse: Float[Array, "B Hq W"]
    received: Float[Array, "B H M"] | None
    lengths: Int[Array, "B"]
    scale: float
    window: int | None
    heads: Heads = ALL_HEADS
    layer: int = 0
    decoding: bool = False


class Moment(NamedTuple):
    """When and where a score is asked for.

    Attributes:
        next_position: the position that comes next in each row.
        layer: its constants and its output projection.
        rope: RoPE's frequencies of each row, where they depend on its length.
        heads: those that the entries belong to. A score may reach others through them where all devices ask alike.
        protected: the entries that stay whatever they score.
    """

    next_position: Int[Array, "B"]
    layer: AttentionLayer
    rope: Float[Array, "B R/2"] | None = None
    heads: Heads = ALL_HEADS
    protected: Bool[Array, "B H M"] | None = None

    @property
    def scale(self) -> float:
        """Of the logits."""
        return self.layer.scale

    @property
    def window(self) -> int | None:
        """The layer's sliding window."""
        return self.layer.window


class Received(NamedTuple):
    """A score's wish to be shown the attention that entries received.

    Attributes:
        reduction: over queries and group.
        last: only the last so many queries of a call count; None for all of them.
        stepwise: only while decoding, when a call has one query.
    """

    reduction: Reduction
    last: int | None = None
    stepwise: bool = False


@dataclass(frozen=True)
class Score(ABC):
    """How much each cached entry matters; larger is kept. The defaults are those of a score without state."""

    @property
    def received(self) -> Received | None:
        """The attention it wants to be shown, if any."""
        return None

    @property
    def stores_queries(self) -> bool:
        """Whether the state holds rotated queries, which are exact only while keys do not change."""
        return False

    @property
    def slotwise(self) -> bool:
        """Whether, at a step, an entry's score and state follow from that entry and the queries alone.

        Of segments of a pool such a score is shown a piece at a time; others are shown as much as the longest holds.
        """
        return False

    def check(self, policy: Policy) -> None:
        """Raises ValueError if this score makes no sense in that policy."""
        return

    def init_slots(self, shape: LayerShape, slots: int) -> Any:
        """State with axes [B, H, ..., slots], zero: what a slot has when a token enters it."""
        return None

    def init_rows(self, shape: LayerShape) -> Any:
        """State with axes [B, H, ...] or, of whole query groups, [B, Hq, ...]."""
        return None

    def observe(self, entries: LayerCache, attended: Attended) -> tuple[Any, Any]:
        """The new (per_slot, per_row) after queries attended to `entries`, which hold the old ones."""
        return entries.per_slot, entries.per_row

    @abstractmethod
    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        """Float32 scores of all entries, those of empty slots being of no account."""


class Budget(Protocol):
    """How many entries each layer keeps of a prompt."""

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"] | None:
        """Entries a kv head of each row keeps in one of the model's `layers`, or None if it keeps everything."""
        ...

    def slots(self, layer: int, prompt_size: int, layers: int) -> int | None:
        """The largest capacity for prompts up to a static size, or None if the layer keeps everything."""
        ...

    @property
    def smallest(self) -> int | None:
        """The smallest capacity that any layer is given, None if it depends on the prompt."""
        ...


class SharedBudget(ABC):
    """Entries that are shared out among layers and heads by what they score, to each prompt in its own way.

    A row's total is what another budget, that of the mean kv head, gives to all layers and heads together. All layers
    of a prompt are read before anything is dropped; the cache is then a pool of segments, a `RaggedCache`.

    Attributes:
        budget: entries of the mean kv head.
    """

    budget: Budget

    @property
    def groups(self) -> int | None:
        """None where all heads of a layer keep equally many entries.

        Otherwise heads compete in so many groups of consecutive kv heads, each of which keeps its own total. A mesh may
        not cut a group, so that what is kept depends on the number of groups and not on the mesh.
        """
        return None

    @property
    def smallest(self) -> int | None:
        return self.budget.smallest

    def check(self, layers: int, kv_heads: int) -> None:
        """Raises ValueError if this is no budget for a model of that shape."""
        return

    @property
    def shows_protected(self) -> bool:
        """Whether `share` is shown what protected entries score, instead of +inf."""
        return False

    def dense(self, layer: int, layers: int) -> bool:
        """Whether all heads of one of the model's `layers` keep everything, prompt and answer."""
        return False

    def growing(self, layers: int, heads: int) -> int:
        """How many segments of a lane of so many heads grow even under a policy that evicts while decoding."""
        return 0

    def entries(self, slots: Sequence[int], heads: int) -> int:
        """The most that a lane of so many heads keeps of a prompt, given the slots of each layer's mean head."""
        return heads * sum(slots)

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"] | None:
        """Of the mean kv head."""
        return self.budget.capacity(layer, prompt_lengths, layers)

    def slots(self, layer: int, prompt_size: int, layers: int) -> int | None:
        """Of the mean kv head."""
        return self.budget.slots(layer, prompt_size, layers)

    @abstractmethod
    def share(
        self, scores: Float[Array, "L B H M"], mean: Int[Array, "B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        """Entries that each head keeps: in each group of heads L * H * mean of them over all layers, or fewer.

        Args:
            scores: as Select sees them: +inf for the protected (but see `shows_protected`), -inf for the ineligible.
            mean: entries of the mean kv head of each row.
            least: no head keeps fewer, as far as it has them.
            heads: those that the scores belong to.
        """
        ...


class Select(Protocol):
    """Which entries fill the budget, given scores that are +inf for the protected and -inf for the ineligible."""

    def keep(
        self,
        scores: Float[Array, "B H M"],
        positions: Int[Array, "B H M"],
        counts: Int[Array, "B H"],
        size: int,
        heads: Heads = ALL_HEADS,
    ) -> Int[Array, "B H size"]:
        """Indices of the entries to keep, ascending, -1 after the last. `heads` are those of the entries."""
        ...

    def victims(
        self, scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], count: int
    ) -> Int[Array, "B H count"]:
        """Indices of `count` entries to evict, S where there is none to evict."""
        ...


@dataclass(frozen=True)
class Merge:
    """What becomes of the entries that are not kept: nothing, unless a subclass says so."""

    @property
    def changes_keys(self) -> bool:
        """Whether entries that stay get other keys, with which stored queries no longer score as they attended."""
        return False

    @property
    def biases(self) -> bool:
        """Whether entries get a bias, which is added to their logits: `LayerCache.bias`."""
        return False

    def check(self, policy: Policy) -> None:
        """Raises ValueError if this merge makes no sense in that policy."""
        return

    def condense(
        self, entries: LayerCache, moment: Moment, scores: Float[Array, "B H M"], counts: Int[Array, "B H"], size: int
    ) -> LayerCache:
        """When a prompt has been read, before anything is selected: the entries merged among themselves.

        Those that went into another are empty in what it returns; `select` then chooses `counts` of the rest, at most
        `size`. Scores are as `Select` sees them.
        """
        return entries

    def absorb_rest(self, entries: LayerCache, moment: Moment, kept: Int[Array, "B H K"]) -> LayerCache:
        """When a prompt has been read and selected from: the entries but those at `kept` (-1: none), merged into these.

        Only what is at `kept` remains of what it returns.
        """
        return entries

    def absorb(self, entries: LayerCache, moment: Moment, lost: Bool[Array, "B H S"], count: int) -> LayerCache:
        """While decoding: the entries about to be evicted, `count` a head or none, merged into those that stay."""
        return entries


@dataclass(frozen=True)
class Storage:
    """How keys and values are held: as they are, unless a subclass says otherwise."""

    def store(self, x: Float[Array, "*tokens D"]) -> Stored:
        """What the cache holds of them, an array or a pytree whose leaves have the same axes but the last.

        Raises ValueError if it does not serve heads of that size.
        """
        return x


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
    storage: Storage = Storage()

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
        return self.score.slotwise and type(self.merge).absorb is Merge.absorb

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
        protected = self.protect.mask(entries.positions, moment.next_position, entries.capacity)
        scores = self.score(entries.plain(), moment._replace(protected=protected))
        return jnp.where(protected | (entries.positions < 0), jnp.inf, scores)

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

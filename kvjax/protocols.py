"""What the parts of a policy are shown and asked: scores, budgets, selections, merges, storage. No part is here.

A part is a frozen dataclass, so a policy hashes and is a static argument of `jax.jit`; what changes from step to step
lives in the cache, as state per slot and per row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.heads import ALL_HEADS, Heads
from kvjax.models import AttentionLayer
from kvjax.pallas_kernels import Asked, Reduction

if TYPE_CHECKING:
    from kvjax.cache import LayerCache
    from kvjax.pallas_kernels import Stored
    from kvjax.policy import Policy

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
        asked: what the entries received from the queries that the score had asked, or None if there was no asking.
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
    asked: Float[Array, "B H M"] | None = None


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
    def repeats_prompt(self) -> bool:
        """Whether the prompt's own tokens are run once more, for which it has to be read in one call."""
        return False

    def check_whole(self, whole: bool) -> None:
        """Raises ValueError if it has to see a prompt in one call, and that is not the `whole` one."""
        if self.repeats_prompt and not whole:
            raise ValueError(f"{type(self).__name__} replays a prompt; accepted is one that is read in one call")

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

    def asks(self, entries: LayerCache, positions: Int[Array, "B"]) -> Asked | None:
        """Queries of whole groups to be asked, while the token at `positions` attends, what they give to each entry.

        So keys that a score would read again are read once. `Attended.asked` is what they gave, but of segments of a
        pool, of which nothing is asked. Rows at position -1 have no token coming in.
        """
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
        return heads * sum(self.dense(layer, layers) for layer in range(layers))

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
    def absorbs(self) -> bool:
        """Whether it merges while decoding, for which it must see all that a head holds."""
        return type(self).absorb is not Merge.absorb

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


AS_THEY_ARE = Storage()

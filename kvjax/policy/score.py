"""Scores: how much each entry of a cache matters. It has the interface of a score, and no method."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from kvjax.cache import Slots
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.models import AttentionLayer
from kvjax.pallas_kernels import Asked, Reduction

from .part import Part
from .passes import Pass, Texts

if TYPE_CHECKING:
    from .policy import Policy


class LayerShape(NamedTuple):
    """The sizes of a layer, from which a part lays out its state.

    `slots` are those of the entries, and 0 where nothing is laid out per slot. `Policy.with_state` sets it.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    hidden: int
    slots: int = 0

    def per_slot(self, *inner: int, dtype: DTypeLike = jnp.float32) -> Shaped[Array, "B H *inner S"]:
        """Returns zeros with these axes between heads and slots: the state of empty slots."""
        return jnp.zeros((self.batch, self.kv_heads, *inner, self.slots), dtype)


class Received(NamedTuple):
    """The attention that a score requests.

    Attributes:
        reduction: over the queries of a call and over the query group.
        last: the number of queries that count, from the last; None for all.
        calls: the calls in which the score receives it: decode steps, where a call has one query per row, prompts, the
            replays of a `Pass`, or all of these.
        slots: the largest number of slots of a prompt for which it is computed, except in steps; None for any.
        weigh: the weight of each query, finite and >= 0, by which its attention is multiplied before the reduction;
            None for 1. It is a function of what a score observes, without `received` and with rotated queries. On a
            mesh it sees the query heads of one device, and all devices must get the same weights.
    """

    reduction: Reduction
    last: int | None = None
    calls: Literal["all", "steps", "prompts", "replays"] = "all"
    slots: int | None = None
    weigh: Callable[[Attended], Float[Array, "B W"]] | None = None

    def shown(self, call: Literal["steps", "prompts", "replays"], slots: int = 0) -> bool:
        """Returns whether a score receives it in a call of this kind, whose tokens follow this number of slots."""
        return self.calls in ("all", call) and (self.slots is None or slots <= self.slots)


@dataclass(frozen=True)
class Needs:
    """The facts of a score. Core code and other parts read nothing else.

    Attributes:
        received: the attention that the score receives, None for none.
        also_received: further attention that `Attended.show` returns, if the score observes for several scores.
        queries: the queries that the score receives: "none", as they saw the keys ("rotated"), or "unrotated", before
            RoPE.
        keeps_queries: whether its state holds rotated queries, which score exactly only while keys do not change.
        whole_prompt: whether it replays the prompt's own tokens, so that the prompt must be read in one call.
        texts: texts, or token ids, that its passes are made of.
        slotwise: whether, in a step, the score and the state of an entry follow from that entry and the queries alone.
        by_count: whether scores depend on how many entries a head retains (`Moment.counts`).
        hidden: the hidden state of each token that it receives when the token enters: "normed", as attention reads it,
            "residual", as it enters the layer, or "" for none. No cache holds hidden states, so that an entry whose
            state was forgotten cannot be scored again.
        gates: the name of the gates beside the parameters (`kvjax.with_gates`) that it reads, or that its passes run
            (`Pass.learned`), '' for none.
        statistics: the names of the `AttentionLayer.statistics` that it reads (`kvjax.with_statistics`).
        marks: facts that parts tell each other by names that they agree on. Core code reads none of them, and a pair of
            parts may add its own. Those in use are

            "signed": scores may be negative, so that shares of their sum and multiples of them make no sense.
            "ordinal": scores are positions, ranks, draws or classes, whose order alone means something.
            "accumulates": scores are sums over all queries so far, so that older entries have larger ones.
            "weighs_values": scores are already multiplied by a norm of the value.
            "decides": with counts, the entries that a head retains score above all others, whatever they scored.
            "heads_alike": all heads of a layer must hold the same tokens in the same slots.
            "query_heads": the state has the attention from each query head (`QueryHeadAttention`).
            "samples": the state has a sample of queries (`QuerySample`).
            "classes": a score is a class from 0 to 3 plus half of the entry's share of the head's attention.
    """

    received: Received | None = None
    also_received: tuple[Received, ...] = ()
    queries: Literal["none", "rotated", "unrotated"] = "none"
    keeps_queries: bool = False
    whole_prompt: bool = False
    texts: tuple[str | tuple[int, ...], ...] = ()
    slotwise: bool = False
    by_count: bool = False
    hidden: Literal["", "normed", "residual"] = ""
    gates: str = ""
    statistics: tuple[str, ...] = ()
    marks: frozenset[str] = frozenset()

    @property
    def wishes(self) -> tuple[Received, ...]:
        """The attention that any score requests, so that the pass over the keys may compute it on the way."""
        return (*(() if self.received is None else (self.received,)), *self.also_received)

    @property
    def asks_the_end(self) -> bool:
        """Tells whether the last queries of a prompt score it, so that a question must end it."""
        return self.keeps_queries or (self.received is not None and self.received.last is not None)


@dataclass(frozen=True)
class Attended:
    """The observation of a score: W queries per row have just attended to M entries.

    Attributes:
        queries: in the form that `Needs.queries` names.
        positions: of the queries, ascending, -1 for padding, which is on the left.
        lse: the log-sum-exp of each query's scaled logits, and of the head's sink if the layer has sinks. -inf for a
            query that saw no entry.
        received: the attention that entries received, reduced by `Needs.received`, with an axis of query heads if
            its group is "none"; None if it requests none, or none in this call.
        lengths: the number of real queries in each row.
        layer: the layer's constants and its output projection.
        heads: the heads that queries and entries belong to. A score reaches other devices of a mesh through them.
        decoding: whether the queries belong to a decode step, not to a text that is read.
        asked: the attention that entries received from the extra query rows of `Score.asks`; None if there were none.
        replay: (first, last) of the `Pass` that these queries belong to, whose own entries are the last W of the M;
            None for the text itself.
        hidden: the hidden states of the queries' tokens in the form that `Needs.hidden` names: as they enter the layer,
            or as its attention reads them, after the norm before attention if the family has one (kvpress shows its
            presses the same). None without it.
        measured: what `Pass.run` has measured of each token of a pass; None without it.
        show: returns what a score with other needs observes of the same queries. None unless a prompt is read.
        rope: RoPE's frequencies of each row, where they depend on the row's length.
    """

    queries: Float[Array, "B Hq W D"]
    positions: Int[Array, "B W"]
    lse: Float[Array, "B Hq W"]
    received: Float[Array, "B H *G M"] | None
    lengths: Int[Array, "B"]
    layer: AttentionLayer
    heads: Heads = ALL_HEADS
    decoding: bool = False
    asked: Float[Array, "B H M"] | None = None
    replay: tuple[Int[Array, "B"], Int[Array, "B"]] | None = None
    hidden: Float[Array, "B W E"] | None = None
    measured: Float[Array, "B W"] | None = None
    show: Callable[[Needs], Attended] | None = None
    rope: Float[Array, "B C/2"] | None = None

    @property
    def scale(self) -> float:
        """The scale of the logits."""
        return self.layer.scale

    @property
    def window(self) -> int | None:
        """The layer's sliding window."""
        return self.layer.window

    def moment(self) -> Moment:
        """Returns the moment for a score that calls another score while it observes.

        The next position is that after the last query, 0 in rows without one. No entry counts as protected, and no
        counts are known.
        """
        return Moment(self.positions[:, -1] + 1, self.layer, self.rope, self.heads)


class Moment(NamedTuple):
    """The time and the layer at which entries are scored.

    Attributes:
        next_position: the position of each row's next token.
        layer: the layer's constants and its output projection.
        rope: RoPE's frequencies of each row, where they depend on the row's length.
        heads: the heads that the entries belong to. A part reaches other devices of a mesh through them, provided that
            all devices do the same.
        protected: the entries that stay whatever they score.
        counts: the number of entries that each head retains. None while a budget that is allocated across heads and
            layers compares scores: these must then be on the scale on which the method defines them.
        leaving: the number of them that leave a full head now: `Policy.every` while decoding, and 0 otherwise.
    """

    next_position: Int[Array, "B"]
    layer: AttentionLayer
    rope: Float[Array, "B C/2"] | None = None
    heads: Heads = ALL_HEADS
    protected: Bool[Array, "B H M"] | None = None
    counts: Int[Array, "B H"] | None = None
    leaving: int = 0

    @property
    def scale(self) -> float:
        """The scale of the logits."""
        return self.layer.scale

    @property
    def window(self) -> int | None:
        """The layer's sliding window."""
        return self.layer.window

    def viewers(self, entries: Slots) -> Int[Array, "B H M"]:
        """Returns how many queries of the row have seen each entry, its own included; at least 1."""
        queries = jnp.maximum(self.next_position[:, None, None] - entries.positions, 1)
        return queries if self.window is None else jnp.minimum(queries, self.window)


@dataclass(frozen=True)
class Score(Part):
    """Scores how much each cached entry matters. Entries with larger scores are retained.

    A subclass declares its facts in `needs` and defines `__call__`. All other methods have defaults for a score without
    state.
    """

    @property
    def needs(self) -> Needs:
        """The facts of this score."""
        return Needs()

    def init(self, shape: LayerShape) -> Any:
        """Returns the state (per_slot, per_row) of a layer.

        State per slot has axes [B, H, ..., slots] and is zero, as it is when a token enters a slot. State per row has
        axes [B, H, ...] or, for all query heads of the kv heads, [B, Hq, ...].
        """
        return None, None

    def asks(self, per_row: Any, positions: Int[Array, "B"]) -> Asked | None:
        """Returns extra query rows to score in a step's pass over the keys, or None.

        The result is `Attended.asked`. It saves a score from reading the keys again. It is None where a kernel would
        read them again.

        Args:
            per_row: the score's state.
            positions: of the incoming tokens, -1 in rows without one.
        """
        return None

    def observe(self, entries: Slots, attended: Attended) -> Any:
        """Returns the new state (per_slot, per_row) after queries attended to `entries`, which hold the old state."""
        return entries.per_slot, entries.per_row

    def across(self, per_row: Sequence[Any]) -> Sequence[Any]:
        """Returns the state per row of each layer after a decode step, in which all of them have observed the token.

        A layer may take numbers [B, H, ...] from the states of others, which are None in layers that retain everything.
        On a mesh these are arrays of all devices.
        """
        return per_row

    def passes(self, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts) -> Sequence[Pass]:
        """Returns the passes to run after a prompt. Their number and their sizes follow from shapes alone.

        Args:
            tokens: of the prompt, right-aligned.
            lengths: of each row.
            texts: the token ids of `Needs.texts`.
        """
        return ()

    @abstractmethod
    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        """Returns float32 scores of all entries. Scores of empty slots are ignored."""


@dataclass(frozen=True)
class ScoreWrapper(Score):
    """A score that changes the result of another one. It forwards everything: a subclass overrides `__call__` only.

    Attributes:
        base: the score whose state, needs and passes these are.
    """

    base: Score

    @property
    def needs(self) -> Needs:
        return self.base.needs

    def check(self, policy: Policy) -> None:
        self.base.check(policy)

    def init(self, shape: LayerShape) -> tuple[Any, Any]:
        return self.base.init(shape)

    def asks(self, per_row: Any, positions: Int[Array, "B"]) -> Asked | None:
        return self.base.asks(per_row, positions)

    def observe(self, entries: Slots, attended: Attended) -> tuple[Any, Any]:
        return self.base.observe(entries, attended)

    def across(self, per_row: Sequence[Any]) -> Sequence[Any]:
        return self.base.across(per_row)

    def passes(self, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts) -> Sequence[Pass]:
        return self.base.passes(tokens, lengths, texts)

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return self.base(entries, moment)

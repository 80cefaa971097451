"""Scores of a prompt by its repetition: the model repeats the prompt chunk by chunk, over the complete cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.checks import shown
from kvjax.models import join_sinks
from kvjax.pallas_kernels import Reduction, compact, prompt_attention, window_scores
from kvjax.pallas_kernels.arrays import by_member
from kvjax.policy import Attended, Needs, Pass, Texts, check_integer

from .projected_norms import projected_norms
from .replayed import ReplayedScore

REPEATED = 8  # the number of tokens before a chunk that its instruction quotes
LARGEST = Reduction(rows="max", group="max")


@dataclass(frozen=True)
class Repetition(ReplayedScore):
    """A score of each entry from the tokens that repeat its chunk, of all heads of the group.

    The prompt is replayed in chunks, after the complete cache: an instruction, then the chunk itself. From the second
    chunk on the instruction quotes the tokens before the chunk. Replayed tokens attend to everything, as they would if
    they were generated. A subclass defines `weighed`. It is shown the first `sinks` entries, the chunk's own entries
    and the replayed tokens, and what it returns for the chunk's own entries counts.

    Attributes:
        sinks: the number of first entries that every chunk's softmax covers.
        chunk: the number of tokens that are repeated at a time.
        instruction: before the first chunk: text, which needs a tokenizer, or token ids. '' is nothing.
        starting: before the other chunks, followed by the 8 tokens that precede the chunk.
        suffix: between the instruction and the chunk, such as what the model's chat template puts before an answer.

    Raises:
        ValueError: for a value that is not accepted.
    """

    sinks: int = 4
    chunk: int = 2048
    instruction: str | tuple[int, ...] = "\n\nRepeat the previous context exactly."
    starting: str | tuple[int, ...] = "\n\nRepeat the part of the previous context exactly, starting with"
    suffix: str | tuple[int, ...] = "\n"

    def __post_init__(self) -> None:
        check_integer("sinks", self.sinks, least=0)
        check_integer("chunk", self.chunk, least=1)
        for name in ("instruction", "starting", "suffix"):
            text = getattr(self, name)
            if not isinstance(text, str | tuple):
                raise ValueError(f"{name}={shown(text)}: expected a text or a tuple of token ids")

    @property
    def needs(self) -> Needs:
        return Needs(queries="rotated", whole_prompt=True, texts=(self.instruction, self.starting, self.suffix))

    def passes(self, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts) -> Sequence[Pass]:
        instruction, starting, suffix = texts
        chunk = min(self.chunk, tokens.shape[1])
        quoted = min(REPEATED, chunk)
        firsts = range(0, tokens.shape[1], chunk)
        return [
            _chunk(tokens, lengths, first, chunk, (*starting, *[-1] * quoted) if first else instruction, suffix)
            for first in firsts
        ]

    def observe(self, entries: Slots, attended: Attended) -> tuple[Float[Array, "B H M"], None]:
        if attended.replay is None:
            return entries.per_slot, None
        own = attended.queries.shape[2]
        past = entries.slots - own
        of_prompt = jnp.arange(entries.slots) < past
        first, last = (x[:, None, None] for x in attended.replay)
        positions = entries.positions
        repeated = of_prompt & (positions >= first) & (positions < last)
        sinks = of_prompt & (positions >= 0) & (positions < self.sinks)
        visible = compact((repeated | sinks)[..., :past], min(past, self.sinks + self.chunk))
        replayed = jnp.broadcast_to(jnp.arange(past, entries.slots), (*visible.shape[:2], own))
        index = jnp.concatenate([visible, replayed], axis=-1)
        counts = (index >= 0) & jnp.take_along_axis(repeated, jnp.maximum(index, 0), axis=-1)
        b, h = jnp.arange(index.shape[0])[:, None, None], jnp.arange(index.shape[1])[:, None]
        scores = self.weighed(entries.gather(index), attended)
        return entries.per_slot.at[b, h, jnp.where(counts, index, entries.slots)].set(scores, mode="drop"), None

    @abstractmethod
    def weighed(self, among: Slots, attended: Attended) -> Float[Array, "B H M"]:
        """Returns float32 scores from the weights of the replayed tokens in a softmax over these entries alone."""


def largest_weights(among: Slots, attended: Attended) -> Float[Array, "B H M"]:
    """Returns the largest weight of each entry in a softmax over these entries."""
    lse = None if attended.layer.sinks is None else attended.heads.whole_groups(_sums(among, attended))
    return window_scores(
        attended.heads.whole_groups(attended.queries),
        among.keys,
        attended.positions,
        among.positions,
        lse=lse,
        **attended.layer.logits,
        reduction=LARGEST,
    )


def largest_contributions(among: Slots, attended: Attended, factors: Float[Array, "B W"]) -> Float[Array, "B H M"]:
    """Returns the largest product of a weight, the norm of the projected value and a factor of the query's token."""
    B, H, M, _ = among.keys.shape
    lse = _sums(among, attended) - jnp.log(jnp.maximum(factors, 1e-30))[:, None]  # multiplies the weights
    norms = projected_norms(among.values, attended.layer.output, order=2).reshape(B, -1, M)
    whole = map(attended.heads.whole_groups, (attended.queries, lse, norms))

    def of_head(head: tuple[Array, Array, Array]) -> Float[Array, "B H M"]:
        """Computes the contributions for one query head of each group."""
        queries, lse, norms = head
        weights = window_scores(
            queries,
            among.keys,
            attended.positions,
            among.positions,
            lse=lse,
            **attended.layer.logits,
            reduction=Reduction(rows="max"),
        )
        return weights * norms

    return jnp.max(jax.lax.map(of_head, tuple(by_member(x, H) for x in whole)), axis=0)


def _sums(among: Slots, attended: Attended) -> Float[Array, "B Hq W"]:
    """Returns the log-sum-exp of each query over these entries and the sinks of the layer's softmax."""
    context, lse = prompt_attention(
        attended.queries, among.keys, among.values, attended.positions, among.positions, **attended.layer.logits
    )
    return join_sinks(context, lse, attended.layer.sinks)[1]


def _chunk(
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    first: int,
    size: int,
    lead: Sequence[int],
    suffix: Sequence[int],
) -> Pass:
    """Returns the pass that repeats `size` tokens of each row, or as many as it has, from position `first` on.

    In `lead`, before the suffix, -1 stands for the tokens that precede the chunk.
    """
    N = tokens.shape[1]
    fixed = jnp.array([*lead, *suffix, -1], jnp.int32)
    before = fixed.shape[0] - 1
    repeated = jnp.clip(lengths - first, 0, size)
    total = jnp.where(repeated > 0, before + repeated, 0)
    place = jnp.arange(before + size) - (before + size - total[:, None])  # in a row's replayed text
    position = first + jnp.where(place < before, place - len(lead), place - before)
    of_prompt = jnp.take_along_axis(tokens, jnp.clip(position + N - lengths[:, None], 0, N - 1), axis=1)
    of_lead = fixed[jnp.clip(place, 0, before)]
    text = jnp.where(of_lead >= 0, of_lead, of_prompt)
    begin = jnp.minimum(first, lengths)
    return Pass(jnp.where(place >= 0, text, 0).astype(tokens.dtype), total, begin, begin + repeated)

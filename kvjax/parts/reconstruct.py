"""KVzip's score: how much an entry is looked at when the model is made to repeat the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import LayerCache
from kvjax.pallas_kernels import Reduction, compact, window_scores
from kvjax.policy import Policy
from kvjax.protocols import Attended, LayerShape, Moment, check_integer
from kvjax.replay import Encode, Pass, ReplayScore, Texts, as_ids

REPEATED = 8  # tokens before a chunk that its instruction quotes


@dataclass(frozen=True)
class Reconstruction(ReplayScore):
    """The largest weight that any query of any head of the group gave to an entry while its part was repeated.

    The prompt is replayed in chunks, behind the whole cache: an instruction, then the chunk itself. From the second on
    the instruction quotes the tokens before the chunk. What is replayed attends to everything, as it would if it were
    generated; the weights that count are those of a softmax over the first `sinks` entries, the chunk's own entries
    and what was replayed so far. On a mesh where devices share a kv head its queries are gathered, once a chunk.

    Attributes:
        sinks: entries that every chunk's softmax covers.
        chunk: tokens to a chunk.
        instruction: before the first chunk: token ids, or text, which needs a tokenizer.
        starting: before the others, followed by the last tokens of the chunk before.
        suffix: between the instruction and the chunk, such as what a chat template puts before an answer.
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
                raise ValueError(f"{name}={text!r}: accepted are a text and a tuple of token ids")

    def check(self, policy: Policy) -> None:
        if policy.every is not None:
            raise ValueError(
                f"Reconstruction scores a prompt, and nothing that is decoded; with every={policy.every} it cannot be "
                "combined"
            )
        if not policy.shares:
            raise ValueError(
                f"Reconstruction runs tokens over the whole prompt, and under {policy.budget} each layer is compressed "
                "before the next one reads it; accepted are budgets that are shared out, such as UniformShares"
            )

    def texts(self, encode: Encode | None) -> Texts:
        return tuple(as_ids(getattr(self, name), encode, name) for name in ("instruction", "starting", "suffix"))

    def passes(self, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], texts: Texts) -> Sequence[Pass]:
        instruction, starting, suffix = texts
        chunk = min(self.chunk, tokens.shape[1])
        quoted = min(REPEATED, chunk)
        firsts = range(0, tokens.shape[1], chunk)
        return [
            _chunk(tokens, lengths, first, chunk, (*starting, *[-1] * quoted) if first else instruction, suffix)
            for first in firsts
        ]

    def init_slots(self, shape: LayerShape, slots: int) -> Float[Array, "B H S"]:
        return jnp.zeros((shape.batch, shape.kv_heads, slots), jnp.float32)

    def replayed(
        self, entries: LayerCache, attended: Attended, first: Int[Array, "B"], last: Int[Array, "B"]
    ) -> tuple[Array, None]:
        own = attended.queries.shape[2]
        past = entries.slots - own
        of_prompt = jnp.arange(entries.slots) < past
        first, last = first[:, None, None], last[:, None, None]
        positions = entries.positions
        asked = of_prompt & (positions >= first) & (positions < last)
        sinks = of_prompt & (positions >= 0) & (positions < self.sinks)
        some = compact((asked | sinks)[..., :past], min(past, self.sinks + self.chunk))
        replayed = jnp.broadcast_to(jnp.arange(past, entries.slots), (*some.shape[:2], own))
        index = jnp.concatenate([some, replayed], axis=-1)
        shown = entries.gather(index)
        weights = window_scores(
            attended.heads.whole_groups(attended.queries),
            shown.keys,
            attended.positions,
            shown.positions,
            scale=attended.scale,
            window=attended.window,
            reduction=Reduction(rows="max", group="max"),
        )
        counts = (index >= 0) & jnp.take_along_axis(asked, jnp.maximum(index, 0), axis=-1)
        b, h = jnp.arange(index.shape[0])[:, None, None], jnp.arange(index.shape[1])[:, None]
        index = jnp.where(counts, index, entries.slots)
        return entries.per_slot.at[b, h, index].set(weights, mode="drop"), None

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot


def _chunk(
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    first: int,
    size: int,
    lead: Sequence[int],
    suffix: Sequence[int],
) -> Pass:
    """The pass that repeats `size` tokens of each row from position `first` on, or what the row has of them.

    In `lead`, before the suffix, -1 stands for the tokens that precede the chunk.
    """
    N = tokens.shape[1]
    fixed = jnp.array([*lead, *suffix, -1], jnp.int32)
    before = fixed.shape[0] - 1
    there = jnp.clip(lengths - first, 0, size)
    total = jnp.where(there > 0, before + there, 0)
    place = jnp.arange(before + size) - (before + size - total[:, None])  # in a row's replayed text
    position = first + jnp.where(place < before, place - len(lead), place - before)
    of_prompt = jnp.take_along_axis(tokens, jnp.clip(position + N - lengths[:, None], 0, N - 1), axis=1)
    of_lead = fixed[jnp.clip(place, 0, before)]
    text = jnp.where(of_lead >= 0, of_lead, of_prompt)
    begin = jnp.minimum(first, lengths)
    return Pass(jnp.where(place >= 0, text, 0).astype(tokens.dtype), total, begin, begin + there)

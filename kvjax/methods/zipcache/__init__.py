"""ZipCache (He et al., NeurIPS 2024, arXiv 2405.14256): stores the salient entries of a prompt with more bits.

Differences from the paper and its released code:

- The number of probes is fixed: the last queries of the prompt, and others drawn before them, none twice. The released
  code takes 5 % of the prompt twice, and may draw a query twice.
- Salience is per kv head, by the mean over the query group. A key's sum is divided by the number of probes that saw it,
  as the paper defines the score. The released code divides by the number of tokens behind a key.
- Values have a range for each token and kv head. The paper's and the released code's have a range for each token, over
  all heads.
- Ranges of keys are those of the salient entries of a head and of its others, as released.
- Generated tokens, and layers with a sliding window, keep their precision, because the entries of such layers leave
  while the answer grows. The paper and the released code code the generated tokens anew after every 100.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots, mark
from kvjax.pallas_kernels import Reduction, compact, top_tokens, window_scores
from kvjax.policy import (
    PLAIN,
    Attended,
    LayerShape,
    Policy,
    Storage,
    check_choice,
    check_integer,
    check_kind,
    check_number,
    ratio_of,
    share_of,
)

from ..common.query_sample import chosen_queries, lots_of
from ..common.settling import check_settling
from ..full import full
from ..registry import preset
from .coded import CodedEntries

FULL = full()
MEAN = Reduction(rows="mean", group="mean")


class Probes(NamedTuple):
    """P queries of each row in order of position. Positions are alike in all heads, -1 for none."""

    queries: Float[Array, "B Hq P D"]
    positions: Int[Array, "B H P"]


@dataclass(frozen=True)
class SalientCodes(Storage):
    """Keys and values of a prompt as codes; those of salient entries have more bits. Later entries are arrays.

    The salience of a key is its normalised attention score: the mean weight that it gets from the probes that saw it,
    in their softmaxes over the entries that its head retains, and over the query group. Of n such entries, the
    n - floor(n (1 - salient)) best are salient; of equal ones, the first. On a mesh where devices share a kv head, they
    exchange the group's probes.

    Attributes:
        salient: the share of salient entries, above 0 and below 1.
        bits: of a number of a salient entry, 8 or 4.
        other_bits: of a number of another entry, 4 or 2, below `bits`.
        window: the number of probes at the end of the prompt.
        queries: the number of probes that are drawn before it.
        seed: of the draws, which are functions of seed and position.
    """

    salient: float = 0.6
    bits: int = 4
    other_bits: int = 2
    window: int = 64
    queries: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("salient", self.salient, "a number above 0 and below 1", lambda x: 0 < x < 1)
        check_choice("bits", self.bits, 8, 4)
        check_choice("other_bits", self.other_bits, 4, 2)
        if self.other_bits >= self.bits:
            raise ValueError(f"other_bits={self.other_bits} with bits={self.bits}: expected fewer bits than these")
        check_integer("window", self.window, least=1)
        check_integer("queries", self.queries, least=0)
        check_integer("seed", self.seed, least=0)

    @property
    def newest(self) -> int:
        return 0

    def check(self, policy: Policy) -> None:
        check_settling("probes keys", policy)

    def store(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
        """Returns the same array: only a prompt that has been read becomes codes."""
        share = 8 // self.other_bits
        if x.shape[-1] % share:
            raise ValueError(
                f"other_bits={self.other_bits} for heads of {x.shape[-1]} channels: expected a multiple of {share} "
                f"channels, as {share} codes share a byte"
            )
        return x

    def init(self, shape: LayerShape) -> Probes:
        P = self.window + self.queries
        return Probes(
            jnp.zeros((shape.batch, shape.heads, P, shape.head_dim), shape.dtype),
            jnp.full((shape.batch, shape.kv_heads, P), -1, jnp.int32),
        )

    def observe(self, entries: Slots, attended: Attended) -> Probes:
        """Returns the last `window` of all queries so far, and of the others those with the largest lots."""
        state: Probes = entries.storing
        H, P = state.positions.shape[1:]
        old = state.positions[:, 0]
        positions = jnp.concatenate([old, attended.positions], axis=1)
        behind = jnp.max(positions, axis=1, keepdims=True) - positions
        lots = jnp.where(behind < self.window, 2.0, lots_of(self.seed, positions))
        _, chosen = jax.lax.top_k(jnp.where(positions >= 0, lots, -1.0), P)
        queries, positions = chosen_queries(state.queries, old, attended, jnp.sort(chosen, axis=-1))
        return Probes(queries, jnp.broadcast_to(positions[:, None], (positions.shape[0], H, P)))

    def settle(self, entries: Slots, **logits: Any) -> Slots:
        newest, older = entries.parted(0)
        probes: Probes = entries.storing
        scores = window_scores(
            probes.queries, older.keys, probes.positions[:, 0], older.positions, **logits, reduction=MEAN
        )
        scores = jnp.where(older.positions >= 0, scores, -jnp.inf)
        # Rounded down alike for all heads, so that one that holds fewer entries has no more of a kind than one that
        # holds more.
        share = 1 - ratio_of(self.salient)
        others, number = share_of(share, older.slots), share_of(share, older.occupancy)
        number = jnp.clip(number, older.occupancy - (older.slots - others), others)
        counts, most = older.occupancy - number, older.slots - others
        salient = top_tokens(scores, older.positions, counts, size=most)
        left = compact((older.positions >= 0) & ~mark(salient, older.slots), others)
        return replace(newest, settled=CodedEntries.of(older, [(self.bits, salient), (self.other_bits, left)]))


@preset
def zipcache(
    base: Policy = FULL,
    salient: float = 0.6,
    bits: Literal[8, 4] = 4,
    other_bits: Literal[4, 2] = 2,
    window: int = 64,
    queries: int = 64,
    seed: int = 0,
) -> Policy:
    """Stores the entries of a prompt as codes: salient entries with `bits` per number, all others with `other_bits`.

        salience[h, i] = sum over probes k of A_ki / (number of probes k that saw i)
        x = low + step * code,    step = (max - min) / (2^bits - 1)

    A_k are the weights of the probes: the last `window` queries of the prompt, and `queries` drawn from those before
    them. Of n entries, floor(n (1 - salient)) are the others.

    - Keys have a low and a step for each channel, over the salient entries of a kv head and over its others.
    - Values v_i are divided by c_i = sqrt(max |v_i|) of their channel, and then have a low and a step for each token.

    Nothing is evicted beyond what the base evicts. Generated tokens and later turns keep their precision, and so do
    layers with a sliding window. A step turns the codes of one layer at a time into arrays: codes take less memory, and
    are not read faster.

    Args:
        base: decides what is retained of the prompt; a policy that compresses prompts only.
        salient: the share of salient entries, above 0 and below 1 (the paper's saliency ratio r).
        bits: of a number of a salient entry, 8 or 4.
        other_bits: of a number of another entry, 4 or 2, below `bits`.
        window: the number of probes at the end of the prompt.
        queries: the number of probes that are drawn at random before it.
        seed: of the draw.

    Raises:
        ValueError: for a value that is not accepted, and for a base that evicts while decoding, whose budget is
            allocated across heads or layers, whose keys are rotated to their places in the cache, whose merge weighs
            entries, or that stores its cache in another form already. For `other_bits` that do not fit the head size,
            once a model is known.
    """
    check_kind("base", base, Policy)
    if base.storage != PLAIN:
        raise ValueError("its base already stores keys and values in another form; choose one that stores arrays")
    return replace(base, storage=SalientCodes(salient, bits, other_bits, window, queries, seed))

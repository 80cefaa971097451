"""Merging on any score (kvpress's MergingPress, after arXiv 2210.09461 and 2406.13035): evicted values are not lost.

An entry that the compression of a prompt does not retain gives its value to the retained entry whose key is most like
its own. Keys stay as they are, and entries that are evicted while decoding are dropped, as in kvpress.

Differences from kvpress:

- Of equally similar keys the earlier one takes the value. kvpress takes the one with the higher score.
- A `fraction` below 1 counts only the entries of each prompt. kvpress takes a quantile over the padded batch.
- Any policy that drops entries can be the base, with budgets by layer or by head too. kvpress accepts scores alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots, mark
from kvjax.policy import Effects, Keep, Merge, Moment, Policy, Ranked, check_kind, check_number, share_of

from .common import nearest
from .common.refusals import check_own_positions
from .registry import preset
from .snapkv import snapkv

SNAPKV = snapkv()
TINY = 1e-6  # in the denominator of weights, as in kvpress


@dataclass(frozen=True)
class NearestValues(Merge):
    """Adds the value of each entry that a prompt's compression drops to that of the most similar retained one.

    With u_i the cosine of evicted key i and of the retained key c nearest to it,

        w_i = max(u_i, 0) |v_i| / (|v_i| + |v_c|)
        v_c <- (v_c + sum w_i v_i) / (1 + sum w_i)

    where the sums are over the entries that c takes in.

    Attributes:
        threshold: the smallest u_i of an entry that is merged, a number in [0, 1].
        fraction: the share of a head's evicted entries that may be merged, those with the largest u_i, in (0, 1].
    """

    threshold: float = 0.0
    fraction: float = 1.0

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        check_number("fraction", self.fraction, "a number in (0, 1]", lambda x: 0 < x <= 1)

    @property
    def effects(self) -> Effects:
        return Effects(at_prompt=True)

    def check(self, policy: Policy) -> None:
        check_own_positions(policy, "compares keys after RoPE")

    def compress(
        self, entries: Slots, moment: Moment, ranked: Ranked, keep: Keep
    ) -> tuple[Slots, Int[Array, "B H size"]]:
        kept = keep(ranked)
        lost = (entries.positions >= 0) & ~mark(kept, entries.slots)
        b, h = jnp.arange(lost.shape[0])[:, None, None], jnp.arange(lost.shape[1])[:, None]
        victims, u, target = nearest.pairs(entries, lost, entries.slots, kept)
        norms = jnp.linalg.norm(entries.values.astype(jnp.float32), axis=-1)
        own, of_target = norms[b, h, victims], norms[b, h, target]
        merged = self._chosen(u, (victims >= 0) & (u > -jnp.inf))
        weight = jnp.where(merged, jnp.maximum(u, 0.0) * own / (own + of_target + TINY), 0.0)
        place = jnp.where(merged, target, entries.slots)
        given = weight[..., None] * entries.values[b, h, victims].astype(jnp.float32)
        taken = jnp.zeros(entries.values.shape, jnp.float32).at[b, h, place].add(given, mode="drop")
        total = jnp.zeros(lost.shape, jnp.float32).at[b, h, place].add(weight, mode="drop")[..., None]
        values = (entries.values.astype(jnp.float32) + taken) / (1.0 + total)
        values = jnp.where(total > 0, values.astype(entries.values.dtype), entries.values)
        return replace(entries, values=values), kept

    def _chosen(self, u: Float[Array, "B H E"], there: Bool[Array, "B H E"]) -> Bool[Array, "B H E"]:
        """Returns which evicted entries are merged: the most similar ones, and those as similar as the last of them."""
        similar = there & (u >= self.threshold)
        n = jnp.sum(there, axis=-1, keepdims=True)
        most = 1 + share_of(self.fraction, n - 1)
        ordered = jnp.flip(jnp.sort(jnp.where(similar, u, -jnp.inf), axis=-1), axis=-1)
        least = jnp.take_along_axis(ordered, jnp.maximum(most - 1, 0), axis=-1)
        return similar & (u >= least)


@preset
def merging(base: Policy = SNAPKV, threshold: float = 0.0, fraction: float = 1.0) -> Policy:
    """Retains what another policy retains, and adds the values of what it drops of a prompt to the most similar ones.

        w_i = max(u_i, 0) |v_i| / (|v_i| + |v_c|),    v_c = (v_c + sum w_i v_i) / (1 + sum w_i)

    u_i is the cosine of the key of evicted entry i and the retained key c of its head that is nearest to it.

    Args:
        base: the policy that decides what stays. It must drop what it does not retain.
        threshold: the smallest u_i of an entry that is merged, in [0, 1].
        fraction: the share of a head's evicted entries that may be merged, the most similar ones, in (0, 1].

    Raises:
        ValueError: for a value that is not accepted, and a base that merges entries itself or places keys anew.
    """
    check_kind("base", base, Policy)
    if base.merge.effects.merges:
        raise ValueError(
            f"its base merges entries itself, by {type(base.merge).__name__}; choose a base that drops what it does "
            "not retain"
        )
    return replace(base, merge=NearestValues(threshold, fraction))

"""D2O's merge: an evicted entry goes into the retained entry that is most like it, or is dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots, mark
from kvjax.policy import Effects, Keep, LayerShape, Merge, Moment, Policy, Ranked, check_choice, check_number

from ..common import nearest
from ..common.refusals import check_own_positions


@dataclass(frozen=True)
class SimilarityMerge(Merge):
    """Merges an evicted entry into the retained entry of its head with the most similar key, if it is similar enough.

    u_i is the cosine of evicted key i and the retained key nearest to it; of equally near keys the earlier counts. The
    means below are over all entries that a layer evicts of a row, after a prompt or in a step:

        tau = mean of u  the first time, afterwards  alpha * tau + beta * mean of u

    The i-th entries by position that the heads evict are merged if the mean of their u_i is tau or more, and dropped
    otherwise. The entry c that takes them in keeps its position and its score, and its value changes as its key does:

        "paper"  k_c <- (e k_c + sum exp(u_i) k_i) / (e + sum exp(u_i))
        "code"   k_c <- (k_c + sum u_i k_i) / (1 + n),  where n entries are merged into c

    The state, `Slots.merging`, is tau [B, H], -inf until it has a value; all heads of a layer have the same.

    On a mesh that distributes kv heads each layer sums u over devices, two numbers per entry that a head evicts, both
    after a prompt and at every step that evicts.

    Attributes:
        weights: "paper", or "code", the released form, which shrinks keys and values.
        alpha: the weight of the old threshold, a number in [0, 1].
        beta: the weight of the mean of u, a number in [0, 1].
    """

    weights: Literal["paper", "code"] = "paper"
    alpha: float = 0.5
    beta: float = 0.5

    def __post_init__(self) -> None:
        check_choice("weights", self.weights, "paper", "code")
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            check_number(name, value, "a number in [0, 1]", lambda x: 0 <= x <= 1)

    @property
    def effects(self) -> Effects:
        return Effects(at_prompt=True, at_steps=True, keys=True)

    def check(self, policy: Policy) -> None:
        check_own_positions(policy, "compares keys after RoPE")

    def init(self, shape: LayerShape) -> Float[Array, "B H"]:
        return jnp.full((shape.batch, shape.kv_heads), -jnp.inf, jnp.float32)

    def compress(
        self, entries: Slots, moment: Moment, ranked: Ranked, keep: Keep
    ) -> tuple[Slots, Int[Array, "B H size"]]:
        kept = keep(ranked)
        lost = (entries.positions >= 0) & ~mark(kept, entries.slots)
        return self._merge(entries, moment, lost, entries.slots, kept), kept

    def absorb(
        self, entries: Slots, moment: Moment, scores: Float[Array, "B H S"], lost: Bool[Array, "B H S"], count: int
    ) -> tuple[Slots, Bool[Array, "B H S"]]:
        return self._merge(entries, moment, lost, count, None), lost

    def _merge(
        self,
        entries: Slots,
        moment: Moment,
        lost: Bool[Array, "B H S"],
        count: int,
        kept: Int[Array, "B H K"] | None,
    ) -> Slots:
        """Merges at most `count` lost entries per head into those at `kept`, or into any that is not lost."""
        b, h = jnp.arange(lost.shape[0])[:, None, None], jnp.arange(lost.shape[1])[:, None]
        victims, u, target = nearest.pairs(entries, lost, count, kept)
        there = (victims >= 0) & (u > -jnp.inf)
        u = jnp.where(there, u, 0.0)
        together, heads = jnp.split(moment.heads.mean(jnp.stack([u, there.astype(u.dtype)], axis=2)), 2, axis=2)
        evicts = jnp.sum(heads, axis=-1) > 0
        mean = jnp.sum(together, axis=-1) / jnp.where(evicts, jnp.sum(heads, axis=-1), 1.0)
        before: Array = entries.merging
        moved = jnp.where(jnp.isneginf(before), mean[:, :, 0], self.alpha * before + self.beta * mean[:, :, 0])
        threshold = jnp.where(evicts[:, :, 0], moved, before)
        similar = together / jnp.where(heads > 0, heads, 1.0) >= threshold[:, :1, None, None] - nearest.CLOSE
        merged = there & similar[:, :, 0]
        weight, own = (u, 1.0) if self.weights == "code" else (jnp.exp(u), math.e)
        weight = jnp.where(merged, weight, 0.0)
        # The first of the entries with a common target stands for all of them, so that the sums are as long as `count`.
        place = jnp.where(merged, target, entries.slots)
        first = jnp.full((*lost.shape[:2], entries.slots), count).at[b, h, place].min(jnp.arange(count), mode="drop")
        column = jnp.where(merged, first[b, h, target], count)
        sums = jnp.zeros(u.shape, jnp.float32)
        total = own + sums.at[b, h, column].add(1.0 if self.weights == "code" else weight, mode="drop")
        place = jnp.where(column == jnp.arange(count), place, entries.slots)

        def blend(x: Float[Array, "B H S D"]) -> Float[Array, "B H S D"]:
            taken = weight[..., None] * x[b, h, victims].astype(jnp.float32)
            taken = jnp.zeros_like(taken).at[b, h, column].add(taken, mode="drop")
            new = (own * x[b, h, target].astype(jnp.float32) + taken) / total[..., None]
            return x.at[b, h, place].set(new.astype(x.dtype), mode="drop")

        return replace(entries, keys=blend(entries.keys), values=blend(entries.values), merging=threshold)

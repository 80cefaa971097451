"""CaM, cache merging (Zhang et al., ICML 2024, https://openreview.net/forum?id=LCTmppB165): merges evicted values.

The base of the method is StreamingLLM: sinks and the most recent tokens stay, so the oldest token after the sinks is
evicted. The accumulated attention of the entries decides only whether the value of an evicted token is merged.

Differences from the paper and its code:

- Values are merged while decoding. Tokens that the prompt's compression evicts are dropped, without a merge.
- A is the attention from all queries so far, and the mean is over the next tokens, as in the paper and in kvpress. The
  released summarisation code weighs by the attention of the current query and by the mean over the complete recent
  window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import compact
from kvjax.policy import Effects, Merge, Moment, Policy, Protect, Ranked, Select, TopTokens, check_choice, check_integer

from .common.accumulated import AccumulatedAttention
from .common.budgets import budget_of
from .common.by_position import RandomDraw
from .registry import preset


@dataclass(frozen=True)
class Newest(Select):
    """Retains the protected entries and the most recent of the others, whatever they score."""

    def keep(self, ranked: Ranked) -> Int[Array, "B H size"]:
        return TopTokens().keep(ranked._replace(scores=_by_age(ranked.scores, ranked.positions)))

    def victims(
        self, scores: Float[Array, "B H S"], positions: Int[Array, "B H S"], count: int
    ) -> Int[Array, "B H count"]:
        return TopTokens().victims(_by_age(scores, positions), positions, count)


def _by_age(scores: Float[Array, "B H M"], positions: Int[Array, "B H M"]) -> Float[Array, "B H M"]:
    """Returns positions as scores. Protected entries and empty slots keep their infinite scores."""
    return jnp.where(jnp.isinf(scores), scores, positions.astype(jnp.float32))


@dataclass(frozen=True)
class ValueMerge(Merge):
    """Distributes the value of an entry evicted while decoding over the next retained entries; its key is dropped.

    Entry i is merged with probability p = min(1, A_i / mean of A over the n next retained entries by position), where n
    is at most `tokens` and A is the policy's score, the attention accumulated so far. v_i / n is then added to the
    value of each of the n. What a prompt's compression evicts is dropped. The merge communicates nothing between
    devices.

    Attributes:
        tokens: the number of entries that the value is distributed over, m in the paper.
        form: "bernoulli" merges all of a value or nothing, by RandomDraw of the `seed`; "expected" adds p v_i / n.
        seed: the seed of the draws, an integer >= 0.
    """

    tokens: int = 32
    form: Literal["bernoulli", "expected"] = "bernoulli"
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("tokens", self.tokens, least=1)
        check_choice("form", self.form, "bernoulli", "expected")
        check_integer("seed", self.seed, least=0)

    @property
    def effects(self) -> Effects:
        return Effects(at_steps=True)

    def check(self, policy: Policy) -> None:
        needs, name = policy.score.needs, type(policy.score).__name__
        if "accumulates" not in needs.marks:
            raise ValueError(
                f"it compares the attention that entries have accumulated, and the score {name} does not accumulate "
                "it; expected a score that does, such as AccumulatedAttention"
            )
        if "weighs_values" in needs.marks or needs.by_count:
            raise ValueError(
                f"it takes scores for accumulated attention, and the score {name} changes them by the values or the "
                "number of retained entries; they cannot be combined"
            )
        if policy.every is None:
            raise ValueError("every=None: expected an integer >= 1, since values are merged while decoding evicts")

    def absorb(
        self, entries: Slots, moment: Moment, scores: Float[Array, "B H S"], lost: Bool[Array, "B H S"], count: int
    ) -> tuple[Slots, Bool[Array, "B H S"]]:
        b, h = jnp.arange(lost.shape[0])[:, None, None], jnp.arange(lost.shape[1])[:, None]
        victims = compact(lost, count)
        positions = entries.positions[b, h, victims]
        after = (entries.positions[:, :, None] > positions[..., None]) & ~lost[:, :, None]
        far = jnp.iinfo(jnp.int32).min
        nearest, index = jax.lax.top_k(
            jnp.where(after, -entries.positions[:, :, None], far), min(self.tokens, entries.slots)
        )
        takes = (nearest > far) & (victims >= 0)[..., None]
        n = jnp.maximum(jnp.sum(takes, axis=-1), 1)
        mean = jnp.sum(jnp.where(takes, scores[b[..., None], h[..., None], index], 0.0), axis=-1) / n
        own = jnp.where(victims >= 0, scores[b, h, victims], 0.0)
        chance = jnp.where(own >= mean, jnp.where(own > 0, 1.0, 0.0), own / jnp.where(mean > 0, mean, 1.0))
        if self.form == "bernoulli":
            chance = (RandomDraw(self.seed)(entries, moment)[b, h, victims] < chance).astype(jnp.float32)
        share = (chance / n)[..., None] * entries.values[b, h, victims].astype(jnp.float32)
        flat = jnp.where(takes, index, entries.slots).reshape(*lost.shape[:2], -1)
        added = jnp.repeat(share.astype(entries.values.dtype), index.shape[-1], axis=2)
        return replace(entries, values=entries.values.at[b, h, flat].add(added, mode="drop")), lost


@preset
def cam(
    budget: int | float = 1024,
    sinks: int = 4,
    tokens: int = 32,
    form: Literal["bernoulli", "expected"] = "bernoulli",
    group: Literal["mean", "sum", "max"] = "mean",
    every: int = 1,
    seed: int = 0,
) -> Policy:
    """Retains the first and the most recent tokens, as `streaming_llm`, and merges the values of evicted tokens.

    With A the attention received from all queries so far and m the option `tokens`, token i is merged with probability
    p:

        p = clamp(A_i / mean(A_{i+1..i+m}), 0, 1)
        v_j = v_j + v_i / m for the next m retained tokens j

    Args:
        budget: the number of entries that a query sees, sinks and itself included. An integer >= 1, or a float in
            (0, 1] for that share of each row's prompt.
        sinks: the number of first tokens, which are always retained.
        tokens: m, an integer >= 1; the released code has 32 and 16. If fewer tokens follow, they share the value.
        form: "bernoulli" is the paper's random decision; "expected" adds p v_i / m deterministically.
        group: the reduction over the query heads of a kv head in A.
        every: the number of entries that a full head evicts at a time while decoding, an integer >= 1.
        seed: the seed of the draws, which are functions of seed, layer, kv head and position.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than sinks + `every`.
    """
    return Policy(
        score=AccumulatedAttention(group),
        budget=budget_of(budget),
        select=Newest(),
        merge=ValueMerge(tokens, form, seed),
        protect=Protect(sinks=sinks),
        every=every,
    )

"""ReST-KV (An et al., ICLR 2026, arXiv 2605.08840): scores an entry by what the output of attention loses without it.

The equations are those of the released code (an-yongqi/rest-kv) with the options of its README; they were not compared
with the paper's text.

Differences from the released code:

- Entries are stored per kv head, and their score is the mean over its query heads. The released code repeats keys and
  values for every query head first, and each query head retains its own.
- The drift of the attention is measured for each row. The released code measures it for the first row of a batch.
- A weight of 1 has odds of 2**23 instead of infinity.
- Under a budget that is allocated by score, heads compete before the drift is known, by scores that are pooled over
  `kernel` entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import Reduction, capped, compact, top_tokens, window_scores
from kvjax.policy import Moment, Needs, Policy, Protect, check_integer, check_number

from .common.budgets import budget_of
from .common.in_turns import in_turns
from .common.pooling import Pooling
from .common.projected_norms import projected_norms
from .common.refusals import check_in_order
from .common.window_attention import QueryRing, QueryWindow
from .registry import preset

APART = Reduction(rows="sum", group="none")
EXACT = jax.lax.Precision.HIGHEST
TERMS = 128  # neighbours that are added up without a loop, which the host of a GPU would drive


@dataclass(frozen=True)
class LostOutput(QueryWindow):
    """The odds of an entry's weight, times how far the output of attention moves away from the entry's value.

    The weights of the last `window` queries are averaged with weights that decay by 1 - alpha per query. Scores are
    pooled along the prompt, over more entries and off centre in a head whose attention drifts.

    Attributes:
        alpha: the weight of the newest query, in (0, 1].
        kernel: the least number of neighbouring entries that are pooled, odd.
        reach: a head whose attention drifts by n * reach positions within the window pools 2 n + 1 entries around the
            n-th one in the direction that it came from. A prompt up to `reach` slots has no such head.
    """

    alpha: float = 0.3
    kernel: int = 5
    reach: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("alpha", self.alpha, "a number in (0, 1]", lambda x: 0 < x <= 1)
        check_integer("reach", self.reach, least=1)
        Pooling("avg", self.kernel)

    @property
    def needs(self) -> Needs:
        return replace(super().needs, by_count=True, marks=frozenset({"weighs_values"}))

    def check(self, policy: Policy) -> None:
        super().check(policy)
        check_in_order(policy, "its pooling")

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        ring: QueryRing = entries.per_row
        B, M = entries.positions.shape[0], entries.slots
        distant = self.distant(entries, moment)
        at = ring.positions[:, 0]
        weights = window_scores(
            ring.queries,
            entries.keys,
            at,
            jnp.where(distant, entries.positions, -1),
            lse=ring.lse - jnp.log(self._shares(at))[:, None],
            bias=entries.bias,
            **moment.layer.logits,
            causal=False,
            reduction=APART,
        )
        outputs = jnp.einsum("BHGM,BHMD->BHGD", weights, entries.values, precision=EXACT)
        own = moment.heads.own_queries(outputs.reshape(B, -1, outputs.shape[-1]))
        apart = projected_norms(entries.values, moment.layer.output, order=2, origin=own)
        apart = moment.heads.whole_groups(apart.reshape(B, -1, M)).reshape(weights.shape)
        odds = weights / jnp.maximum(1 - weights, jnp.finfo(jnp.float32).eps)
        drift = jnp.zeros(weights.shape[:3], jnp.int32)
        if self.reach < M and moment.counts is not None:
            drift = self._drift(entries, moment, moment.counts - self.window)
        return jnp.mean(self._pooled(odds * apart, distant, drift), axis=2)

    def _shares(self, at: Int[Array, "B W"]) -> Float[Array, "B W"]:
        """The share of each query of the window in the moving average that begins with the oldest one."""
        age = jnp.max(at, axis=1, keepdims=True) - at
        oldest = age == jnp.sum(at >= 0, axis=1, keepdims=True) - 1
        return jnp.where(oldest, 1.0, self.alpha) * (1 - self.alpha) ** jnp.where(at >= 0, age, 0)

    def _drift(self, entries: Slots, moment: Moment, number: Int[Array, "B H"]) -> Int[Array, "B H G"]:
        """Measures how far the attention of each query head drifts back within the window, in multiples of `reach`.

        The drift is the mean position of the `number` entries with the largest weights of a query, for the older half
        of the window's queries less that for the newer half.
        """
        ring: QueryRing = entries.per_row
        B, H, M = entries.positions.shape
        group, half = ring.queries.shape[1] // H, self.window // 2
        held = jnp.repeat(entries.positions, group, axis=1)
        chosen = jnp.repeat(jnp.maximum(number, 1), group, axis=1)

        def summed(query: tuple[Array, Array]) -> Float[Array, "B Hq"]:
            q, at = query
            logits = jnp.einsum(
                "BHGD,BHMD->BHGM", q.reshape(B, H, group, -1), entries.keys, preferred_element_type=jnp.float32
            )
            logits = capped(logits * moment.scale, moment.layer.softcap)
            if entries.bias is not None:
                logits = logits + entries.bias[:, :, None]
            seen = (held >= 0) & (held <= at[:, None, None])
            if moment.window is not None:
                seen &= held > at[:, None, None] - moment.window
            top = top_tokens(jnp.where(seen, logits.reshape(held.shape), -jnp.inf), held, chosen, size=M)
            positions = jnp.take_along_axis(held, jnp.maximum(top, 0), axis=-1)
            return jnp.sum(positions.astype(jnp.float32), axis=-1, where=top >= 0)

        at = ring.positions[:, 0]
        sums = in_turns(summed, (jnp.moveaxis(ring.queries, 2, 0), at.T))
        age = (jnp.max(at, axis=1, keepdims=True) - at).T[..., None]
        older, newer = age >= self.window - half, age < half
        moved = jnp.sum(jnp.where(older, sums, 0) - jnp.where(newer, sums, 0), axis=0)  # exact in short prompts
        # Number by number, because the product may exceed 32 bits.
        moved = moved / chosen / max(half, 1) / self.reach
        return jnp.trunc(moved).astype(jnp.int32).reshape(B, H, group)

    def _pooled(
        self, scores: Float[Array, "B H G M"], eligible: Bool[Array, "B H M"], drift: Int[Array, "B H G"]
    ) -> Float[Array, "B H G M"]:
        """The mean of each entry's neighbours in the text, of which the first and the last go on beyond its ends."""
        M, side = scores.shape[-1], self.kernel // 2
        most = M // self.reach
        span = max(side, most) + most
        slots, last = compact(eligible, M), jnp.sum(eligible, axis=-1, keepdims=True) - 1
        at = jnp.take_along_axis(slots, jnp.clip(jnp.arange(-span, M + span), 0, jnp.maximum(last, 0)), axis=-1)
        text = jnp.take_along_axis(scores, jnp.maximum(at, 0)[:, :, None], axis=-1)
        reach = jnp.maximum(side, jnp.abs(drift))[..., None]
        near = jnp.abs(jnp.arange(-span, span + 1) - drift[..., None]) <= reach
        share = near / (2 * reach + 1)

        def add(pooled: Float[Array, "B H G M"], i: Int[Array, ""]) -> tuple[Float[Array, "B H G M"], None]:
            own = jax.lax.dynamic_index_in_dim(share, i, axis=-1)
            return pooled + own * jax.lax.dynamic_slice_in_dim(text, i, M, axis=-1), None

        pooled, _ = jax.lax.scan(add, jnp.zeros_like(scores), jnp.arange(2 * span + 1), unroll=TERMS)
        place = jnp.maximum(jnp.cumsum(eligible, axis=-1) - 1, 0)
        return jnp.take_along_axis(pooled, place[:, :, None], axis=-1)


@preset
def restkv(
    budget: int | float = 1024, window: int = 32, alpha: float = 0.3, kernel: int = 5, reach: int = 2000
) -> Policy:
    """Compresses the prompt once, by how far the output of attention would move if an entry were gone.

    With a[g, c] the moving average of the weights of the last `window` queries r of query head g on entry c, which is
    alpha softmax(q_r . k)_c + (1 - alpha) a[g, c] after each query, and o[g] = sum over c of a[g, c] v_c,

        score[h, c] = mean over the query group g of h of pool over c (a[g, c] / (1 - a[g, c]) |W_O[g] (o[g] - v_c)|_2)

    Sum and scores are of the entries older than the window, and the softmax is over all entries. If a weight a is
    removed and the others grow in proportion, the output moves by a / (1 - a) |o - v|. W_O[g] is the rows of the output
    projection that belong to query head g. The mean of `kernel` neighbours is taken. With t the mean position of the
    entries that the older half of the window's queries attend to most, less that of the newer half, and
    n = trunc(t / reach) other than 0, it is the mean of max(kernel, 2 |n| + 1) neighbours around c + n.

    Args:
        budget: the number of entries retained of the prompt, window included. An integer >= 1, or a float in (0, 1] for
            that share of each row's prompt.
        window: the size of the observation window in tokens. It is always retained.
        alpha: the weight of a query in the moving average, in (0, 1].
        kernel: the least size of the pooling along the prompt, odd.
        reach: the drift of a head's attention, in positions, from which on its pooling grows and moves (the paper's
            beta). In prompts that are shorter no head drifts as far.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than `window` + 1.
    """
    return Policy(
        score=LostOutput(window, alpha, kernel, reach), budget=budget_of(budget), protect=Protect(recent=window)
    )

"""G-KV (Liao et al., arXiv 2512.00504): scores by attention that lasts across evictions, minus key redundancy.

Differences from the paper and its code:

- The score is that of the released code: the maximum over the query group, the mean over the window, divided by the
  largest, without pooling. `mix=0.5`, `decay=0.8` and `window=16` are those of its script.
- Each row evicts when its own cache is full.
- If no key is similar to a key, the released code exempts the first cached entry from that key's similarities. Here
  nothing is exempt, as in `rkv`.
- The paper also trains models for compressed caches, which is no part of kvjax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import Reduction
from kvjax.policy import Attended, LayerShape, Moment, Policy, Protect, check_number

from .common.budgets import budget_of
from .common.redundancy import redundancy
from .common.window_attention import QueryRing, QueryWindow, WindowAttention
from .registry import preset

REDUCTION = Reduction(rows="mean", group="max", first="group")


class Lasting(NamedTuple):
    """The score F of the eviction that comes next, and that of the last eviction."""

    now: Float[Array, "B H S"]
    before: Float[Array, "B H S"]


class Asking(NamedTuple):
    """The window's queries, and how many tokens had left each head when its F was last computed.

    Tokens that have left a layer's sliding window since then are counted too: they were not evicted.
    """

    ring: QueryRing
    left: Int[Array, "B H"]


@dataclass(frozen=True)
class GlobalAttention(QueryWindow):
    """`mix` times the lasting attention of an entry minus (1 - `mix`) times the redundancy of its key.

    Whenever a head is full, the attention from the window, divided by the largest, is compared with `decay` times the
    lasting attention, and the larger one lasts. What was computed without an eviction does not last. Both terms are
    divided by the largest in the head. The state is the window's queries, two numbers per slot and one per head.
    Between evictions a step scores nothing.

    Attributes:
        window: the number of last queries.
        decay: the factor of lasting attention from one eviction to the next.
        mix: the weight of attention against redundancy.
        threshold: the cosine above which two keys are similar.
    """

    decay: float
    mix: float
    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("decay", self.decay, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        check_number("mix", self.mix, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        check_number("threshold", self.threshold, "a number in [-1, 1]", lambda x: -1 <= x <= 1)

    def init(self, shape: LayerShape) -> tuple[Lasting, Asking]:
        none = shape.per_slot()
        evicted = jnp.zeros((shape.batch, shape.kv_heads), jnp.int32)
        return Lasting(none, none), Asking(QueryRing.empty(shape, self.window), evicted)

    def observe(self, entries: Slots, attended: Attended) -> tuple[Lasting, Asking]:
        ring: QueryRing = entries.per_row.ring.push(attended)
        last: Lasting = entries.per_slot
        moment = attended.moment()

        def attention() -> Float[Array, "B H M"]:
            """Returns the attention from the window, as a share of the largest."""
            own = replace(entries, per_slot=None, per_row=ring)
            local = WindowAttention(self.window, REDUCTION)(own, moment)
            return local / jnp.maximum(jnp.max(local, axis=-1, keepdims=True), 1e-30)

        asks = jnp.broadcast_to((attended.lengths > 0)[:, None], entries.capacity.shape)
        if attended.decoding:
            asks = asks & (entries.occupancy >= entries.capacity)
            local = jax.lax.cond(jnp.any(asks), attention, lambda: jnp.zeros_like(last.now))
        else:
            local = attention()  # of a head that is not full, it is computed again before it counts
        left = moment.next_position[:, None] - entries.occupancy
        before = jnp.where((left > entries.per_row.left)[..., None], last.now, last.before)
        now = Lasting(jnp.maximum(self.decay * before, local), before)
        lasting = jax.tree.map(lambda new, old: jnp.where(asks[..., None], new, old), now, last)
        left = jnp.where(asks, left, entries.per_row.left)
        if moment.window is not None:  # before anything is evicted
            unseen = entries.positions <= moment.next_position[:, None, None] - moment.window
            left += jnp.sum(unseen & (entries.positions >= 0), axis=-1)
        return lasting, Asking(ring, left)

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        distant = self.distant(entries, moment)
        repeated = redundancy(entries, self.threshold)
        largest = jnp.max(jnp.where(distant, repeated, 0), axis=-1, keepdims=True)
        return self.mix * entries.per_slot.now - (1 - self.mix) * repeated / jnp.maximum(largest, 1e-30)


@preset
def gkv(
    budget: int | float = 1024,
    window: int = 16,
    decay: float = 0.8,
    mix: float = 0.5,
    threshold: float = 0.5,
    every: int | None = 128,
) -> Policy:
    """Retains the tokens that were important at any eviction so far and whose keys are unlike those of others.

    At the t-th eviction of a head, with A the mean over the last `window` queries of the maximum over the query group
    of softmax(q . k), and R the redundancy of `rkv`, the entries older than the window score

        F_t[c] = max(decay * F_(t-1)[c], A[c] / max A)
        score[c] = mix * F_t[c] - (1 - mix) * R[c] / max R

    `gkv:mix=1.0` is G-KV without redundancy.

    Args:
        budget: the most entries that a query sees, itself and the buffer included: the paper's budget + `every`. An
            integer >= 1, or a float in (0, 1] for that share of each row's prompt.
        window: the number of most recent tokens, which are always retained and whose queries score the others.
        decay: the factor of an earlier score, the paper's alpha.
        mix: the weight of attention, the paper's lambda. 1 leaves redundancy out.
        threshold: the cosine above which two keys are similar.
        every: the number of tokens that are evicted at a time. None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than `window` + `every`.
    """
    return Policy(
        score=GlobalAttention(window, decay, mix, threshold),
        budget=budget_of(budget),
        protect=Protect(recent=window),
        every=every,
    )

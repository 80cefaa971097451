"""CaM's merge: the value of an evicted token goes into those of the tokens after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache import LayerCache
from kvjax.pallas_kernels import compact
from kvjax.policy import Policy
from kvjax.protocols import Merge, Moment, check_integer

from .keys import RandomDraw
from .score import AccumulatedAttention


@dataclass(frozen=True)
class WatchedRecency(AccumulatedAttention):
    """The later the better; the attention that entries received so far is kept for a merge to look at."""

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        return entries.positions.astype(jnp.float32)


@dataclass(frozen=True)
class ValueMerge(Merge):
    """While decoding, an evicted token's value is shared out among the next kept tokens; its key is dropped (CaM).

    Token i is merged with probability p = min(1, A_i / mean of A over the n next kept tokens by position), n at most
    `tokens`, A being the attention received so far; v_i / n is then added to the value of each of them. What a prompt's
    compression leaves out is dropped. It communicates nothing.

    Attributes:
        tokens: how many share the value, m in the paper.
        form: "bernoulli" merges all of a value or nothing, by RandomDraw of the `seed`; "expected" adds p v_i / n.
    """

    tokens: int = 32
    form: Literal["bernoulli", "expected"] = "bernoulli"
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("tokens", self.tokens, least=1)
        if self.form not in ("bernoulli", "expected"):
            raise ValueError(f"form={self.form!r}: accepted are 'bernoulli' and 'expected'")
        check_integer("seed", self.seed, least=0)

    def check(self, policy: Policy) -> None:
        if not isinstance(policy.score, AccumulatedAttention):
            raise ValueError(
                f"ValueMerge looks at the attention that entries have received, which {type(policy.score).__name__} "
                "does not keep; accepted are AccumulatedAttention and WatchedRecency"
            )
        if policy.every is None:
            raise ValueError(
                "ValueMerge merges while decoding, and every=None evicts nothing then; accepted is 1 or more"
            )

    def absorb(self, entries: LayerCache, moment: Moment, lost: Bool[Array, "B H M"], count: int) -> LayerCache:
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
        received: Array = entries.per_slot
        mean = jnp.sum(jnp.where(takes, received[b[..., None], h[..., None], index], 0.0), axis=-1) / n
        own = received[b, h, victims]
        chance = jnp.where(own >= mean, jnp.where(own > 0, 1.0, 0.0), own / jnp.where(mean > 0, mean, 1.0))
        if self.form == "bernoulli":
            chance = (RandomDraw(self.seed)(entries, moment)[b, h, victims] < chance).astype(jnp.float32)
        share = (chance / n)[..., None] * entries.values[b, h, victims].astype(jnp.float32)
        flat = jnp.where(takes, index, entries.slots).reshape(*lost.shape[:2], -1)
        added = jnp.repeat(share.astype(entries.values.dtype), index.shape[-1], axis=2)
        return replace(entries, values=entries.values.at[b, h, flat].add(added, mode="drop"))

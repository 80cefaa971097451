"""CriticalKV's score: another score, weighed with what values add to the layer's output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import LayerCache
from kvjax.pallas_kernels import top_tokens
from kvjax.policy import Policy, mark
from kvjax.protocols import Attended, LayerShape, Moment, Received, Score

from .expected import ExpectedAttention
from .score import LastAttention

BLOCK = 64  # values that are projected at once


@dataclass(frozen=True)
class ProjectedValues(Score):
    """The base's score times the L1 norm of the value behind the output projection, mean of the query group.

    A share of the budget goes by the base's score alone before that; what is protected is part of it. On a mesh where
    devices share a kv head, they exchange a number for each entry.

    Attributes:
        base: whose state this is.
        first: the share of the budget that the base fills.
        epsilon: added to the base's score.
    """

    base: Score
    first: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        for name, accepted in (("first", "a float in [0, 1)"), ("epsilon", "a float >= 0")):
            value = getattr(self, name)
            if not isinstance(value, float) or not value >= 0 or (name == "first" and value >= 1):
                raise ValueError(f"{name}={value!r}: accepted is {accepted}")

    @property
    def received(self) -> Received | None:
        return self.base.received

    @property
    def stores_queries(self) -> bool:
        return self.base.stores_queries

    def check(self, policy: Policy) -> None:
        replace(policy, score=self.base)  # raises what the base has to say
        if isinstance(self.base, ProjectedValues):
            raise ValueError("ProjectedValues of ProjectedValues count values twice; accepted is another base")
        if isinstance(self.base, LastAttention):
            raise ValueError(
                "LastAttention averages over heads slot by slot, for which all must hold the same tokens, and "
                "ProjectedValues gives each head its own; they cannot be combined"
            )
        if isinstance(self.base, ExpectedAttention) and self.base.value_norm:
            raise ValueError(
                "ProjectedValues of an ExpectedAttention that weighs values count them twice; accepted is "
                "value_norm=False"
            )

    def init_slots(self, shape: LayerShape, slots: int) -> Any:
        return self.base.init_slots(shape, slots)

    def init_rows(self, shape: LayerShape) -> Any:
        return self.base.init_rows(shape)

    def observe(self, entries: LayerCache, attended: Attended) -> tuple[Any, Any]:
        return self.base.observe(entries, attended)

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        scores, there = self.base(entries, moment), entries.positions >= 0
        ranked = scores if moment.protected is None else jnp.where(moment.protected, jnp.inf, scores)
        number = jnp.floor(jnp.minimum(entries.capacity, entries.slots) * self.first + 1e-4).astype(jnp.int32)
        chosen = top_tokens(jnp.where(there, ranked, -jnp.inf), entries.positions, number, size=entries.slots)
        weighed = (scores + self.epsilon) * self._norms(entries.values, moment)
        above = 2 * jnp.max(jnp.where(there, jnp.abs(weighed), 0), axis=-1, keepdims=True) + 1
        return jnp.where(mark(chosen, entries.slots), weighed + above, weighed)

    def _norms(self, values: Float[Array, "B H M D"], moment: Moment) -> Float[Array, "B H M"]:
        own = jnp.mean(projected_norms(values, moment, order=1), axis=2)
        B, H, M = own.shape
        return jnp.mean(moment.heads.whole_groups(own).reshape(B, H, -1, M), axis=2)


def projected_norms(
    values: Float[Array, "B H M D"], moment: Moment, *, order: Literal[1, 2]
) -> Float[Array, "B H G M"]:
    """The L1 or L2 norm of each value behind the layer's output projection, for each of this device's query heads."""
    B, H, M, D = values.shape
    output = moment.layer.output
    output = output.reshape(H, -1, D, output.shape[-1])
    blocks = -(-M // BLOCK)
    values = jnp.pad(values, ((0, 0), (0, 0), (0, blocks * BLOCK - M), (0, 0)))
    values = jnp.moveaxis(values.reshape(B, H, blocks, BLOCK, D), 2, 0)

    def of_block(values: Float[Array, "B H K D"]) -> Float[Array, "B H G K"]:
        projected = jnp.einsum("BHKD,HGDE->BHGKE", values, output, preferred_element_type=jnp.float32)
        return jnp.linalg.norm(projected, ord=order, axis=-1)

    return jnp.moveaxis(jax.lax.map(of_block, values), 0, 3).reshape(B, H, -1, blocks * BLOCK)[..., :M]

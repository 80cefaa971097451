"""D2O's layer budgets: the more evenly a layer's attention lies on a prompt, the more the layer keeps of it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.heads import Heads
from kvjax.protocols import UNLIMITED, SharedBudget, check_integer

from .budget import Fixed, Fraction
from .shared import check_layers_alike


@dataclass(frozen=True)
class VarianceShares(SharedBudget):
    """Layers share their budget by the variance of their scores over a prompt; the first and the last keep everything.

    With v the variance of a head's scores over all tokens of the prompt, protected ones included, and x the mean of
    (v - min v) / (max v - min v) over the heads of a layer (0 where all are equal), a layer keeps the share

        clamp(softmax(-x) * L * rho, 0.01, 1)

    of a prompt, rho being that which the budget is of the prompt and L the number of layers that are compressed. All
    heads of a layer keep as many. What the lower bound adds is taken from the other layers, what the upper one cuts is
    left unused, and the largest remainders are rounded up: together the layers never keep more than L times the
    budget. With fewer than three kv heads x is the same for all layers, and so is what they keep.

    On a mesh that spreads kv heads, v is gathered once a prompt.

    Attributes:
        budget: entries of the mean of the layers that are compressed.
        first: so many of the first layers keep everything, prompt and answer.
        last: likewise of the last ones.
    """

    budget: Fixed | Fraction
    first: int = 2
    last: int = 1

    def __post_init__(self) -> None:
        check_integer("first", self.first, least=0)
        check_integer("last", self.last, least=0)
        check_layers_alike(self)

    def check(self, layers: int, kv_heads: int) -> None:
        if self.first + self.last >= layers:
            raise ValueError(
                f"the first {self.first} and the last {self.last} of {layers} layers keep everything, which leaves "
                f"none to compress; accepted are fewer than {layers} together"
            )

    @property
    def shows_protected(self) -> bool:
        return True

    def dense(self, layer: int, layers: int) -> bool:
        return layer < self.first or layer >= layers - self.last

    def slots(self, layer: int, prompt_size: int, layers: int) -> int | None:
        return prompt_size if self.dense(layer, layers) else self.budget.slots(layer, prompt_size, layers)

    def share(
        self, scores: Float[Array, "L B H M"], mean: Int[Array, "B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        L, B, H = scores.shape[:3]
        sharing = jnp.array([layer for layer in range(L) if not self.dense(layer, L)])
        there = scores > -jnp.inf
        held = jnp.sum(there, axis=-1)
        average = jnp.sum(jnp.where(there, scores, 0.0), axis=-1) / jnp.maximum(held, 1)
        square = jnp.where(there, (scores - average[..., None]) ** 2, 0.0)
        variance = heads.whole_layer(jnp.moveaxis(jnp.sum(square, axis=-1) / jnp.maximum(held, 1), 0, 2))
        low, high = jnp.min(variance, axis=1, keepdims=True), jnp.max(variance, axis=1, keepdims=True)
        x = jnp.mean((variance - low) / jnp.where(high > low, high - low, 1.0), axis=1)[:, sharing]
        total = mean * x.shape[1]
        lengths = jnp.max(held, axis=2).T
        floor = jnp.minimum(jnp.maximum(least, (lengths + 99) // 100), mean[:, None])[:, sharing]
        wanted = jax.nn.softmax(-x, axis=-1) * total[:, None]
        counts = _apportion(jnp.clip(wanted, floor, jnp.maximum(lengths[:, sharing], floor)), total, floor)
        fits = jnp.max(lengths, axis=1) <= mean
        counts = jnp.where(fits[:, None], mean[:, None], counts)
        every_layer = jnp.full((L, B), UNLIMITED, jnp.int32).at[sharing].set(counts.T)
        return jnp.broadcast_to(every_layer[..., None], (L, B, H))


def _apportion(wanted: Float[Array, "B X"], total: Int[Array, "B"], floor: Int[Array, "B X"]) -> Int[Array, "B X"]:
    """Integers that add up to what is wanted, or to the total where that is less, none below its floor."""
    beyond = wanted - floor
    excess = jnp.maximum(jnp.sum(wanted, axis=-1) - total, 0.0) / jnp.maximum(jnp.sum(beyond, axis=-1), 1e-30)
    exact = wanted - beyond * excess[:, None]
    whole = jnp.floor(exact + 1e-4).astype(jnp.int32)
    missing = jnp.minimum(jnp.round(jnp.sum(exact, axis=-1)).astype(jnp.int32), total) - jnp.sum(whole, axis=-1)
    rank = jnp.argsort(jnp.argsort(whole - exact, axis=-1), axis=-1)
    counts = whole + (rank < missing[:, None])
    most = jnp.arange(counts.shape[1]) == jnp.argmax(counts - floor, axis=-1)[:, None]
    return counts - most * jnp.maximum(jnp.sum(counts, axis=-1) - total, 0)[:, None]  # float32 may be off by a few

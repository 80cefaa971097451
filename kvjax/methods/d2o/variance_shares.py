"""D2O's layer budgets: the more evenly a layer's attention lies on a prompt, the more of it the layer retains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import UNLIMITED
from kvjax.mesh.heads import Heads
from kvjax.policy import AllocatedBudget, Layout, check_alike, check_integer, most_entries

EQUAL = 1e-5  # variances that differ by less, relatively, differ by the rounding of their sums


@dataclass(frozen=True)
class VarianceShares(AllocatedBudget):
    """Allocates a budget to layers by the variance of their scores over a prompt; outer layers retain everything.

    v is the variance of a head's scores over all tokens of the prompt, protected ones included. x is the mean of
    (v - min v) / (max v - min v) over the heads of a layer, 0 if all are equal but for rounding. Scores that are ranks,
    as LagKV's are, have equal variances. A layer retains the share

        clamp(softmax(-x) * L * rho, 0.01, 1)

    of a prompt, where rho is the budget's share of the prompt and L the number of compressed layers. All heads of a
    layer retain the same number. What the lower bound adds is taken from the other layers, and what the upper bound
    cuts is left unused. The largest remainders are rounded up: together the layers never retain more than L times the
    budget. With fewer than three kv heads x is the same for all layers, and so are their counts.

    On a mesh that distributes kv heads, v is gathered once per prompt.

    Attributes:
        budget: entries of the mean of the compressed layers, the same for all layers.
        dense_first: the number of first layers that retain everything, prompt and answer.
        dense_last: the same for the last layers.
    """

    dense_first: int = 2
    dense_last: int = 1

    def __post_init__(self) -> None:
        check_integer("dense_first", self.dense_first, least=0)
        check_integer("dense_last", self.dense_last, least=0)
        check_alike(self.budget)
        if most_entries(self.budget, 0, 1, 1) is None:
            raise ValueError(f"a budget of {self.budget}: expected one with a limit, such as Fixed")

    @property
    def layout(self) -> Layout:
        return Layout(dense=(self.dense_first, self.dense_last), compares_protected=True)

    def check_model(self, layers: int, kv_heads: int) -> None:
        if self.dense_first + self.dense_last >= layers:
            raise ValueError(
                f"the first {self.dense_first} and the last {self.dense_last} of {layers} layers retain everything, "
                f"which leaves none to compress; expected fewer than {layers} together"
            )

    def entries(self, means: Sequence[int], sizes: Sequence[int], heads: int) -> int:
        layers = range(len(means))
        return heads * sum(sizes[i] if self.layout.is_dense(i, len(means)) else means[i] for i in layers)

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        L, B, H = scores.shape[:3]
        compressed = jnp.array([layer for layer in range(L) if not self.layout.is_dense(layer, L)])
        means = means[compressed].T
        there = scores > -jnp.inf
        held = jnp.sum(there, axis=-1)
        average = jnp.sum(jnp.where(there, scores, 0.0), axis=-1) / jnp.maximum(held, 1)
        square = jnp.where(there, (scores - average[..., None]) ** 2, 0.0)
        variance = heads.whole_layer(jnp.moveaxis(jnp.sum(square, axis=-1) / jnp.maximum(held, 1), 0, 2))
        low, high = jnp.min(variance, axis=1, keepdims=True), jnp.max(variance, axis=1, keepdims=True)
        spread = jnp.where(high - low > EQUAL * high, (variance - low) / jnp.maximum(high - low, 1e-30), 0.0)
        x = jnp.mean(spread, axis=1)[:, compressed]
        total = jnp.sum(means, axis=1)
        lengths = jnp.max(held, axis=2)[compressed].T
        floor = jnp.minimum(jnp.maximum(least, (lengths + 99) // 100), means)
        wanted = jax.nn.softmax(-x, axis=-1) * total[:, None]
        counts = _apportion(jnp.clip(wanted, floor, jnp.maximum(lengths, floor)), total, floor)
        fits = jnp.all(lengths <= means, axis=1)
        counts = jnp.where(fits[:, None], means, counts)
        every_layer = jnp.full((L, B), UNLIMITED, jnp.int32).at[compressed].set(counts.T)
        return jnp.broadcast_to(every_layer[..., None], (L, B, H))


def _apportion(wanted: Float[Array, "B X"], total: Int[Array, "B"], floor: Int[Array, "B X"]) -> Int[Array, "B X"]:
    """Integers whose sum is that of `wanted`, or the total if that is less; none is below its floor."""
    beyond = wanted - floor
    excess = jnp.maximum(jnp.sum(wanted, axis=-1) - total, 0.0) / jnp.maximum(jnp.sum(beyond, axis=-1), 1e-30)
    exact = wanted - beyond * excess[:, None]
    rounded = jnp.floor(exact + 1e-4).astype(jnp.int32)
    missing = jnp.minimum(jnp.round(jnp.sum(exact, axis=-1)).astype(jnp.int32), total) - jnp.sum(rounded, axis=-1)
    rank = jnp.argsort(jnp.argsort(rounded - exact, axis=-1), axis=-1)
    counts = rounded + (rank < missing[:, None])
    most = jnp.arange(counts.shape[1]) == jnp.argmax(counts - floor, axis=-1)[:, None]
    return counts - most * jnp.maximum(jnp.sum(counts, axis=-1) - total, 0)[:, None]  # float32 may be off by a few

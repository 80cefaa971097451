"""Pooling of scores along a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.pallas_kernels import compact, traced_once
from kvjax.policy import Part, check_choice, check_number


@dataclass(frozen=True)
class Pooling(Part):
    """1-D pooling along the prompt with stride 1, centred, so that neighbours of an important token score high too.

    Attributes:
        kind: "avg" divides by `kernel` at the borders as well (zero padding); "max" ignores what lies beyond a border.
        kernel: the number of neighbouring entries that are pooled, odd.
    """

    kind: Literal["avg", "max"] = "max"
    kernel: int = 7

    def __post_init__(self) -> None:
        check_choice("pooling", self.kind, "avg", "max")
        check_number(
            "kernel", self.kernel, "an odd integer >= 1", lambda x: isinstance(x, int) and x > 0 and x % 2 == 1
        )

    @traced_once
    def __call__(self, scores: Float[Array, "B H M"], eligible: Bool[Array, "B H M"]) -> Float[Array, "B H M"]:
        """Pools the eligible entries, which are in order of position; gaps between them do not separate neighbours."""
        start, combine = (0.0, jax.lax.add) if self.kind == "avg" else (-jnp.inf, jax.lax.max)
        packed = compact(eligible, scores.shape[-1])
        taken = jnp.take_along_axis(scores, jnp.maximum(packed, 0), axis=-1, mode="promise_in_bounds")
        together = jnp.where(packed >= 0, taken, start)
        kernel = min(self.kernel, 2 * scores.shape[-1] + 1)  # a larger one reaches no other entry
        side = kernel // 2
        pooled = jax.lax.reduce_window(
            together,
            jnp.float32(start),
            combine,
            window_dimensions=(1, 1, kernel),
            window_strides=(1, 1, 1),
            padding=((0, 0), (0, 0), (side, side)),
        )
        if self.kind == "avg":
            pooled = pooled / self.kernel
        place = jnp.maximum(jnp.cumsum(eligible, axis=-1) - 1, 0)
        return jnp.take_along_axis(pooled, place, axis=-1, mode="promise_in_bounds")

    def along_text(
        self, scores: Float[Array, "B H M"], positions: Int[Array, "B H M"], eligible: Bool[Array, "B H M"]
    ) -> Float[Array, "B H M"]:
        """Returns the same for entries in any order of slots."""
        order = jnp.argsort(positions, axis=-1)
        in_order = (jnp.take_along_axis(x, order, axis=-1) for x in (scores, eligible))
        return jnp.take_along_axis(self(*in_order), jnp.argsort(order, axis=-1), axis=-1)

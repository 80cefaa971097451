"""The heads that a device holds. What a part communicates with other devices, it does through this and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped


@dataclass(frozen=True)
class Heads:
    """The heads of a layer as one device sees them: all of them, unless a mesh spreads them.

    All devices must take part in what is asked here, so never ask it in a branch or loop that may differ between them.

    Attributes:
        kv_axis: the mesh axis over which kv heads are spread, if they are.
        group_axis: the mesh axis over which the query heads of one kv head are spread, where there are more devices
            than kv heads. Each of them holds the kv head's whole cache, and must keep the same of it.
    """

    kv_axis: str | None = None
    group_axis: str | None = None

    def mean(self, x: Float[Array, "B H *rest"]) -> Float[Array, "B 1 *rest"]:
        """Over all kv heads of the layer."""
        own = jnp.mean(x, axis=1, keepdims=True)
        return own if self.kv_axis is None else jax.lax.pmean(own, self.kv_axis)

    def kv_devices(self) -> int:
        """Over how many devices the layer's kv heads are spread."""
        return 1 if self.kv_axis is None else jax.lax.axis_size(self.kv_axis)

    def kv_indices(self, own: int) -> Int[Array, "H"]:
        """Returns which of the layer's kv heads this device has, given how many it has."""
        first = 0 if self.kv_axis is None else jax.lax.axis_index(self.kv_axis) * own
        return first + jnp.arange(own)

    def whole_layer(self, x: Shaped[Array, "B h *rest"]) -> Shaped[Array, "B H *rest"]:
        """Gathers arrays of this device's kv heads into those of all kv heads of the layer."""
        return x if self.kv_axis is None else jax.lax.all_gather(x, self.kv_axis, axis=1, tiled=True)

    def whole_groups(self, x: Shaped[Array, "B hq *rest"]) -> Shaped[Array, "B Hq *rest"]:
        """Gathers arrays of this device's query heads into those of all query heads of its kv heads.

        What is then computed of a query group is equal on all devices that share the kv head.
        """
        return x if self.group_axis is None else jax.lax.all_gather(x, self.group_axis, axis=1, tiled=True)

    def whole_groups_of(self, own: int) -> int:
        """Returns how many query heads there are in whole groups, given those of this device."""
        return own if self.group_axis is None else own * jax.lax.axis_size(self.group_axis)

    def own_queries(self, x: Shaped[Array, "B Hq *rest"]) -> Shaped[Array, "B hq *rest"]:
        """The inverse of `whole_groups`."""
        if self.group_axis is None:
            return x
        size = x.shape[1] // jax.lax.axis_size(self.group_axis)
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.group_axis) * size, size, axis=1)


ALL_HEADS = Heads()
"""The heads of a layer that no mesh spreads."""

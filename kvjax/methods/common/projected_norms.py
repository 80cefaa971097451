"""The norms of values behind the output projection: how far a value moves its layer's output."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from .in_turns import in_turns

BLOCK = 64  # values that are projected at a time


def projected_norms(
    values: Float[Array, "B H M D"],
    output: Float[Array, "Hq D E"],
    *,
    order: Literal[1, 2],
    origin: Float[Array, "B Hq D"] | None = None,
) -> Float[Array, "B H G M"]:
    """Returns |W_O[g] (v - o[g])|, float32: the norm of each value behind the output projection of each query head g.

    Args:
        values: of this device's kv heads.
        output: the output projection of this device's query heads, of which each kv head has G.
        order: 1 for the L1 norm, 2 for the L2 norm.
        origin: o, which is subtracted from the values; None for 0.
    """
    B, H, M, D = values.shape
    output = output.reshape(H, -1, D, output.shape[-1])
    start: Any = 0.0
    if origin is not None:
        origin = origin.reshape(B, H, -1, D)
        start = jnp.einsum("BHGD,HGDE->BHGE", origin, output, preferred_element_type=jnp.float32)[:, :, :, None]
    blocks = -(-M // BLOCK)
    values = jnp.pad(values, ((0, 0), (0, 0), (0, blocks * BLOCK - M), (0, 0)))
    values = jnp.moveaxis(values.reshape(B, H, blocks, BLOCK, D), 2, 0)

    def of_block(values: Float[Array, "B H K D"]) -> Float[Array, "B H G K"]:
        projected = jnp.einsum("BHKD,HGDE->BHGKE", values, output, preferred_element_type=jnp.float32) - start
        # A GPU's loop that stores what a reduction returns is not part of a CUDA graph. The maximum changes nothing.
        return jnp.maximum(jnp.linalg.norm(projected, ord=order, axis=-1), 0)

    return jnp.moveaxis(in_turns(of_block, values), 0, 3).reshape(B, H, -1, blocks * BLOCK)[..., :M]

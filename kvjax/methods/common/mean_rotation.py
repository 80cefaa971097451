"""RoPE averaged over positions that are still to come."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.policy import Moment


def mean_rotation(
    moment: Moment, dim: int, ahead: Int[np.ndarray, "T"]
) -> Callable[[Float[Array, "B H N D"]], Float[Array, "B H N D"]]:
    """Returns the mean RoPE matrix over positions that are `ahead` of each row's next position.

    It is linear, but no longer a rotation.
    """
    rope = moment.layer.rope
    frequencies = jnp.asarray(rope.frequencies_of(dim, moment.rope))
    positions = moment.next_position[:, None] + ahead
    angles = positions[..., None].astype(jnp.float32) * jnp.expand_dims(frequencies, -2)
    cos, sin = (rope.attention_factor * jnp.mean(f(angles), axis=1)[:, None, None] for f in (jnp.cos, jnp.sin))
    half = frequencies.shape[-1]

    def turn(x: Float[Array, "B H N D"]) -> Float[Array, "B H N D"]:
        first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    return turn

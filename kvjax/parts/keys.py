"""Scores that look at the cached keys alone, or at nothing: no attention is asked for and no state is kept."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import LayerCache
from kvjax.protocols import Moment, Score, check_integer


@dataclass(frozen=True)
class KeyNorm(Score):
    """The negative Euclidean norm of the key: keys that are small receive much attention."""

    @property
    def slotwise(self) -> bool:
        return True

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        return -jnp.linalg.norm(entries.keys.astype(jnp.float32), axis=-1)


@dataclass(frozen=True)
class KeyDifference(Score):
    """The negative cosine between a key and the anchor, the mean of all unit keys: what is unlike the others stays."""

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        keys = entries.keys.astype(jnp.float32)
        # Sums of products and no array of unit keys, which would be written as large as the keys in float32.
        length = jnp.maximum(jnp.sqrt(jnp.sum(keys * keys, axis=-1)), 1e-12)
        share = jnp.where(entries.positions >= 0, 1 / length, 0)
        anchor = jnp.sum(keys * share[..., None], axis=2)  # its length does not change the order
        anchor /= jnp.maximum(jnp.linalg.norm(anchor, axis=-1, keepdims=True), 1e-12)
        return -jnp.sum(keys * anchor[:, :, None], axis=-1) / length


@dataclass(frozen=True)
class RandomDraw(Score):
    """A number drawn uniformly for each token: a function of the seed, the layer, the kv head and the position."""

    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, least=0)

    @property
    def slotwise(self) -> bool:
        return True

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        layer = jax.random.fold_in(jax.random.key(self.seed), moment.layer.index)
        heads = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(layer, moment.heads.kv_indices(entries.keys.shape[1]))

        def draw(head: Array, position: Array) -> Float[Array, ""]:
            return jax.random.uniform(jax.random.fold_in(head, position))

        by_position = jax.vmap(draw, in_axes=(None, 0))
        return jax.vmap(jax.vmap(by_position), in_axes=(None, 0))(heads, entries.positions)

"""The statistical leverage of keys: how much a key is unlike all others of its head."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.models import rotate
from kvjax.pallas_kernels.matrices import eigh
from kvjax.policy import Moment, Policy, Score, check_integer

from .refusals import check_own_positions

RIDGE = 1e-2  # added to the diagonal of X' X, as kvpress adds it


@dataclass(frozen=True)
class LeverageScore(Score):
    """The approximate statistical leverage of each key before RoPE: diag(X (X' X + ridge)^-1 X').

    X has one row per entry of a head: its key less the mean key, times a Gaussian matrix [D, sketch] of variance
    1 / sketch. It needs no attention weights and no state.

    Attributes:
        sketch: the number of columns of the Gaussian matrix.
        seed: of the Gaussian matrix.
    """

    sketch: int = 48
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("sketch", self.sketch, least=1)
        check_integer("seed", self.seed, least=0)

    def check(self, policy: Policy) -> None:
        check_own_positions(policy, "rotates cached keys back from their own positions")

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        held = entries.positions[..., None] >= 0
        sketched = jnp.einsum(
            "BHMD,HDK->BHMK", unrotated(entries, moment), self.gaussian(entries, moment), precision="highest"
        )
        sketched = jnp.where(held, sketched, 0)
        mean = jnp.sum(sketched, axis=2, keepdims=True) / jnp.maximum(jnp.sum(held, axis=2, keepdims=True), 1)
        centred = jnp.where(held, sketched - mean, 0)
        gram = jnp.einsum("BHMK,BHML->BHKL", centred, centred, precision="highest")
        # An eigenbasis needs no larger ridge where there are fewer tokens than columns; a Cholesky factor would.
        values, vectors = eigh(gram)
        along = jnp.einsum("BHMK,BHKL->BHML", centred, vectors, precision="highest")
        scores = jnp.sum(along**2 / (jnp.maximum(values, 0) + RIDGE)[:, :, None], axis=-1)
        # In the first layer equal tokens have equal keys. Rounding lets the earlier position decide, and not the noise.
        return jax.lax.reduce_precision(scores, exponent_bits=8, mantissa_bits=12)

    def gaussian(self, entries: Slots, moment: Moment) -> Float[Array, "H D K"]:
        """Returns the matrix of each kv head, by its number in the layer."""
        H, _, D = entries.keys.shape[1:]
        layer = jax.random.fold_in(jax.random.key(self.seed), moment.layer.index)

        def of_head(number: Array) -> Float[Array, "D K"]:
            return jax.random.normal(jax.random.fold_in(layer, number), (D, self.sketch)) * self.sketch**-0.5

        return jax.vmap(of_head)(moment.heads.kv_indices(H))


def unrotated(entries: Slots, moment: Moment) -> Float[Array, "B H M D"]:
    """Returns the keys before RoPE, float32."""
    rope, keys = moment.layer.rope, entries.keys.astype(jnp.float32)
    frequencies = rope.frequencies_of(keys.shape[-1], moment.rope)
    return rotate(keys, -jnp.maximum(entries.positions, 0), frequencies, 1 / rope.attention_factor)

"""Scores that follow from the position of a token: the most recent tokens, and tokens drawn at random."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.policy import Moment, Needs, Score, check_integer


@dataclass(frozen=True)
class Recency(Score):
    """Later tokens score higher: the score is the position."""

    @property
    def needs(self) -> Needs:
        return Needs(slotwise=True, marks=frozenset({"ordinal"}))

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return entries.positions.astype(jnp.float32)


@dataclass(frozen=True)
class RandomDraw(Score):
    """A number drawn uniformly from [0, 1) for each token.

    The draw is a function of the seed, the layer, the kv head and the token's position, so a row's draws depend neither
    on the other rows of the batch nor on the slots that its tokens occupy.

    Attributes:
        seed: an integer >= 0.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, least=0)

    @property
    def needs(self) -> Needs:
        return Needs(slotwise=True, marks=frozenset({"ordinal"}))

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        layer = jax.random.fold_in(jax.random.key(self.seed), moment.layer.index)
        heads = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(layer, moment.heads.kv_indices(entries.keys.shape[1]))

        def draw(head: Array, position: Array) -> Float[Array, ""]:
            return jax.random.uniform(jax.random.fold_in(head, position))

        by_position = jax.vmap(draw, in_axes=(None, 0))
        return jax.vmap(jax.vmap(by_position), in_axes=(None, 0))(heads, entries.positions)

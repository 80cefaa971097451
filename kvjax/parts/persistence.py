"""Scissorhands' score: how often a token received little."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from kvjax.cache import LayerCache
from kvjax.pallas_kernels import Reduction, window_scores
from kvjax.policy import Policy
from kvjax.protocols import Attended, LayerShape, Moment, Received, Score, check_integer

WORD = 32
MEAN = Reduction(rows="sum", group="mean")


@dataclass(frozen=True)
class Neglect(Score):
    """The negative number of the last `window` queries that gave a token less than the mean of all that they saw.

    A slot keeps one bit for each query of the window, that of position p at bit p mod `window`: whether the weight it
    received, mean of the query group, was below 1 / (tokens that the query saw). Queries older than a token, or that
    saw it before it was cached, count for nothing. On a mesh where devices share a kv head, they exchange the group's
    queries.
    """

    window: int

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=1)

    @property
    def received(self) -> Received:
        return Received(MEAN, stepwise=True)

    def check(self, policy: Policy) -> None:
        if policy.positions != "original":
            raise ValueError(
                "Neglect asks the prompt's keys again, as they were rotated when they came in; it cannot be combined "
                f"with positions={policy.positions!r}"
            )

    def init_slots(self, shape: LayerShape, slots: int) -> UInt32[Array, "B H window/32 S"]:
        return jnp.zeros((shape.batch, shape.kv_heads, -(-self.window // WORD), slots), jnp.uint32)

    def observe(self, entries: LayerCache, attended: Attended) -> tuple[Array, None]:
        if attended.received is not None:
            return self._note(entries, attended, entries.per_slot, attended.received, attended.positions[:, 0]), None
        last = slice(-self.window, None)
        queries, lse = (attended.heads.whole_groups(x[:, :, last]) for x in (attended.queries, attended.lse))

        def note(bits: Array, row: tuple[Array, Array, Array]) -> tuple[Array, None]:
            query, sums, position = row
            weights = window_scores(
                query[:, :, None],
                entries.keys,
                position[:, None],
                entries.positions,
                scale=attended.scale,
                bias=entries.bias,
                lse=sums[:, :, None],
                window=attended.window,
                reduction=MEAN,
            )
            return self._note(entries, attended, bits, weights, position), None

        rows = jnp.moveaxis(queries, 2, 0), jnp.moveaxis(lse, 2, 0), attended.positions[:, last].T
        return jax.lax.scan(note, entries.per_slot, rows)[0], None

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        return -jnp.sum(jax.lax.population_count(entries.per_slot), axis=2).astype(jnp.float32)

    def _note(
        self,
        entries: LayerCache,
        attended: Attended,
        bits: UInt32[Array, "B H R/32 M"],
        weights: Float[Array, "B H M"],
        position: Int[Array, "B"],
    ) -> UInt32[Array, "B H R/32 M"]:
        """The bits with those of one query in each row, which saw what is not newer than it."""
        at = position[:, None, None]
        seen: Bool[Array, "B H M"] = (entries.positions >= 0) & (entries.positions <= at)
        if attended.window is not None:
            seen &= entries.positions > at - attended.window
        low = seen & (weights * jnp.sum(seen, axis=-1, keepdims=True) < 1)
        index = (position % self.window)[:, None, None, None]
        own = (jnp.arange(bits.shape[2])[:, None] == index // WORD) & (at >= 0)[..., None]
        bit = jnp.where(own, jnp.uint32(1) << (index % WORD).astype(jnp.uint32), jnp.uint32(0))
        return (bits & ~bit) | jnp.where(low[:, :, None], bit, jnp.uint32(0))

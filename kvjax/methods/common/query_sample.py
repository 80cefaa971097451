"""A random sample of the queries of a text, kept beside the state of any score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import Asked
from kvjax.policy import Attended, LayerShape, Moment, Needs, Score, ScoreWrapper, check_integer, check_kind


class Sample(NamedTuple):
    """R queries of each row, as they saw the keys. Positions and lots are alike in all heads, -1 for none."""

    queries: Float[Array, "B Hq R D"]
    positions: Int[Array, "B H R"]
    lots: Float[Array, "B H R"]


class Sampled(NamedTuple):
    """A sample, and the state per row of the score around which it is taken."""

    sample: Sample
    base: Any


@dataclass(frozen=True)
class QuerySample(ScoreWrapper):
    """Wraps a score, and keeps a sample of the text's queries for a merge that fits entries to them.

    A query is in the sample if its lot, a function of the seed and its position, is among the largest. So the sample
    depends neither on the batch nor on the pieces in which a prompt is read. Decode steps do not change it. On a mesh
    where devices hold the same kv head, they exchange the group's queries.

    Attributes:
        base: the score that ranks entries.
        queries: the number of positions in the sample.
        seed: of the lots.
    """

    queries: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_kind("base", self.base, Score)
        check_integer("queries", self.queries, least=1)
        check_integer("seed", self.seed, least=0)
        if self.base.needs.queries == "unrotated" or "samples" in self.base.needs.marks:
            raise ValueError(
                f"QuerySample: its base {type(self.base).__name__} observes queries before RoPE or samples them "
                "already; choose a base that does neither"
            )

    @property
    def needs(self) -> Needs:
        needs = self.base.needs
        return replace(needs, queries="rotated", keeps_queries=True, marks=needs.marks | {"samples"})

    def init(self, shape: LayerShape) -> tuple[Any, Sampled]:
        per_slot, per_row = self.base.init(shape)
        queries = jnp.zeros((shape.batch, shape.heads, self.queries, shape.head_dim), shape.dtype)
        none = jnp.full((shape.batch, shape.kv_heads, self.queries), -1)
        return per_slot, Sampled(Sample(queries, none, none.astype(jnp.float32)), per_row)

    def asks(self, per_row: Sampled, positions: Int[Array, "B"]) -> Asked | None:
        return self.base.asks(per_row.base, positions)

    def observe(self, entries: Slots, attended: Attended) -> tuple[Any, Sampled]:
        per_slot, per_row = self.base.observe(_of_base(entries), attended)
        sample: Sample = entries.per_row.sample
        if attended.replay is None and not attended.decoding:
            sample = self._drawn(sample, attended)
        return per_slot, Sampled(sample, per_row)

    def across(self, per_row: Sequence[Sampled | None]) -> Sequence[Sampled | None]:
        after = self.base.across([None if own is None else own.base for own in per_row])
        return [None if own is None else own._replace(base=base) for own, base in zip(per_row, after, strict=True)]

    def _drawn(self, old: Sample, attended: Attended) -> Sample:
        """Returns the sample of the old one and the new queries."""
        R = self.queries
        lots = jnp.concatenate([old.lots[:, 0], lots_of(self.seed, attended.positions)], axis=1)
        lots, chosen = jax.lax.top_k(lots, R)
        queries, positions = chosen_queries(old.queries, old.positions[:, 0], attended, chosen)
        heads = old.lots.shape[:2]
        return Sample(queries, *(jnp.broadcast_to(x[:, None], (*heads, R)) for x in (positions, lots)))

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return self.base(_of_base(entries), moment)


def lots_of(seed: int, positions: Int[Array, "B W"]) -> Float[Array, "B W"]:
    """Returns a number in [0, 1) for each position, a function of the seed and the position; -1 for padding."""

    def lot(position: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), position))

    return jnp.where(positions >= 0, jax.vmap(jax.vmap(lot))(positions), -1.0)


def chosen_queries(
    queries: Float[Array, "B Hq R D"], positions: Int[Array, "B R"], attended: Attended, chosen: Int[Array, "B R"]
) -> tuple[Float[Array, "B Hq R D"], Int[Array, "B R"]]:
    """Selects R of a row's old and then new queries by their indices, in whole query groups, with their positions."""
    R = positions.shape[1]
    is_old = chosen < R
    before, after = jnp.minimum(chosen, R - 1), jnp.maximum(chosen - R, 0)
    new = jnp.take_along_axis(attended.queries, after[:, None, :, None], axis=2)
    queries = jnp.where(
        is_old[:, None, :, None],
        jnp.take_along_axis(queries, before[:, None, :, None], axis=2),
        attended.heads.whole_groups(new),
    )
    positions = jnp.where(
        is_old,
        jnp.take_along_axis(positions, before, axis=1),
        jnp.take_along_axis(attended.positions, after, axis=1),
    )
    return queries, positions


def sample_of(entries: Slots) -> Sample:
    """Returns the sample that a score that is marked "samples" keeps."""
    return entries.per_row.sample


def _of_base(entries: Slots) -> Slots:
    """Returns the entries with the base's state."""
    return replace(entries, per_row=entries.per_row.base)

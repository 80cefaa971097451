"""The steps of a TPU kernel over heads of different lengths: none for tiles that a head does not have.

    rows of a lane    [ part 0 | part 1 | part 2 | part 3 | part 4 | part 5 | ... ]     tiles of two parts
    heads                [ head 0 ######## ][ head 1 ###][ head 2 ##### ]
    step 0: head 0, tile 0      step 1: head 1, tile 0     step 2: head 1, tile 1     step 3: head 2, tile 1  ...

A step works on one tile of one head. A tile consists of neighbouring parts, and each part is an operand of its own, so
that a part without rows of the head is not fetched. In its place stays the part that was fetched last. A head without
rows has one step, which fetches nothing and writes the head's result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.lax import div, rem
from jaxtyping import Array, Int

from .common import SMEM_BYTES


@dataclass(frozen=True, eq=False)
class Steps:
    """The numbers in scalar memory when a kernel starts. Heads are counted over all batch rows: n of B * H.

    The cores of a chip share the heads: each takes consecutive ones, of about as many steps.

    Attributes:
        parts: per tile.
        most: an upper bound of the number of steps.
        first: the first part of each head in its lane.
        stop: the part after the last one; `first` if the head has no rows.
        begin: the first step of each head, and the number of all steps.
        table: for each part of a tile, the step that fetched what the part holds in each step; the same for what is
            fetched by tile; and the head of each step.
        cuts: the first step of each core, and the number of all steps.
    """

    parts: int
    most: int
    first: Int[Array, "n"]
    stop: Int[Array, "n"]
    begin: Int[Array, "n+1"]
    table: Int[Array, "(parts+2)*most"]
    cuts: Int[Array, "cores+1"]

    @classmethod
    def of(
        cls,
        start: Int[Array, "n"],
        used: Int[Array, "n"],
        *,
        size: int,
        parts: int,
        most: int,
        cores: int,
        together: int = 1,
    ) -> Steps:
        """Plans the steps for heads with `used` rows from `start` on.

        Args:
            size: rows per part.
            cores: that share the work; fewer take part if there are fewer heads.
            together: the number of consecutive heads that one core takes.

        Raises:
            NotImplementedError: for more steps than scalar memory holds numbers for.
        """
        heads = start.shape[0]
        fitting = (SMEM_BYTES // 4 - 6 * heads) // (parts + 2)
        if most > fitting:
            raise NotImplementedError(f"{most} tiles: expected at most {fitting} for {heads} heads")
        start, used = start.astype(jnp.int32), used.astype(jnp.int32)
        first, last = div(start, size), div(start + used - 1, size)
        stop = jnp.where(used > 0, last + 1, first)
        before = div(first, parts)  # the tile with the first part
        tiles = jnp.where(used > 0, div(last, parts) - before + 1, 1)
        n = jnp.arange(heads + 1, dtype=jnp.int32)
        begin = jnp.sum(jnp.where(n[:-1] < n[:, None], tiles, 0), axis=1, dtype=jnp.int32)
        # Part c of a head's tiles is fetched in the steps since .. until, and held until another head fetches one. The
        # table is one maximum over heads, so that XLA computes it in one kernel.
        entry = jnp.arange((parts + 2) * most, dtype=jnp.int32)[:, None]
        step, line = rem(entry, most), div(entry, most)
        part = jnp.minimum(line, parts - 1)
        since = div(first + rem(part + parts - rem(first, parts), parts), parts) - before + begin[:-1]
        until = div(stop + parts - 1 - part, parts) - 1 - before + begin[:-1]
        since, until = jnp.where(line < parts, since, begin[:-1]), jnp.where(line < parts, until, begin[1:] - 1)
        fetched = (since <= step) & (since <= until) & ((used > 0) | (line > parts))
        table = jnp.max(jnp.where(fetched, jnp.where(line > parts, n[:-1], jnp.minimum(until, step)), 0), axis=1)
        groups, cores = begin[::together], min(cores, heads // together)
        cuts = groups[:: len(groups) - 1]
        if cores > 1:
            share = div(jnp.arange(cores + 1, dtype=jnp.int32) * begin[-1] + cores - 1, cores)
            cuts = jnp.min(jnp.where(groups >= share[:, None], groups, begin[-1]), axis=1)
            cuts = jnp.clip(cuts, groups[: cores + 1], groups[-cores - 1 :])  # each core has a head
        return cls(parts, most, first, stop, begin, table, cuts)

    @property
    def scalars(self) -> tuple[Any, ...]:
        """The operands to prefetch."""
        return self.first, self.stop, self.begin, self.table, self.cuts

    @property
    def grid(self) -> tuple[Any, ...]:
        """The cores, and the steps of the core that has most."""
        return self.cuts.shape[0] - 1, jnp.max(self.cuts[1:] - self.cuts[:-1])

    def read(self, scalars: tuple[Any, ...]) -> Steps:
        """The same, as a kernel and its index maps see the prefetched operands."""
        names = "first", "stop", "begin", "table", "cuts"
        return replace(self, **dict(zip(names, scalars, strict=True)))

    def step(self, core: Array, i: Array) -> Array:
        """Step i of a core. After the core's last step it is that step again."""
        return jnp.minimum(self.cuts[core] + i, self.cuts[core + 1] - 1)

    def idle(self, core: Array, i: Array) -> Array:
        """Returns whether i is after the core's last step."""
        return self.cuts[core] + i >= self.cuts[core + 1]

    def head(self, step: Array) -> Array:
        """The head of a step."""
        return self.table[(self.parts + 1) * self.most + step]

    def tile(self, step: Array) -> tuple[Array, Array]:
        """The head of a step, and the tile of its lane."""
        n = self.head(step)
        return n, div(self.first[n], self.parts) + step - self.begin[n]

    def fetched(self, step: Array, part: int | None = None) -> tuple[Array, Array]:
        """The head and the tile that are fetched for a part of this step, or for what is fetched by tile."""
        return self.tile(self.table[(self.parts if part is None else part) * self.most + step])

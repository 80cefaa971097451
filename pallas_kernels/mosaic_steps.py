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
from jax.lax import div
from jaxtyping import Array, Int

from .mosaic import SMEM_BYTES


@dataclass(frozen=True, eq=False)
class Steps:
    """What is known in scalar memory when a kernel starts. Heads are counted over all batch rows: n of B * H.

    The cores of a chip share the heads: each takes consecutive ones, of about as many steps.

    Attributes:
        parts: per tile.
        most: an upper bound of the number of steps.
        first: the first part of each head in its lane.
        stop: the part after the last one; `first` if the head has no rows.
        begin: the first step of each head, and the number of all steps.
        head: of each step.
        held: for each part of a tile, the step that fetched what the part holds in each step; then the same for what
            is fetched by tile.
        cuts: the first step of each core, and the number of all steps.
    """

    parts: int
    most: int
    first: Int[Array, "n"]
    stop: Int[Array, "n"]
    begin: Int[Array, "n+1"]
    head: Int[Array, "most"]
    held: Int[Array, "(parts+1)*most"]
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
        fitting = (SMEM_BYTES // 4 - 4 * heads) // (parts + 2)
        if most > fitting:
            raise NotImplementedError(f"{most} tiles: expected at most {fitting} for {heads} heads")
        first = start.astype(jnp.int32) // size
        stop = jnp.where(used > 0, (start.astype(jnp.int32) + used + size - 1) // size, first)
        before = first // parts  # the tile with the first part
        tiles = jnp.where(used > 0, (stop + parts - 1) // parts - before, 1)
        number, step = jnp.arange(heads + 1, dtype=jnp.int32), jnp.arange(most, dtype=jnp.int32)
        begin = jnp.sum(jnp.where(number[:-1] < number[:, None], tiles, 0), axis=1, dtype=jnp.int32)
        head = jnp.sum((begin[1:] <= step[:, None]).astype(jnp.int32), axis=1)
        # Of the parts c, c + parts, c + 2 parts .. of a lane, those of a head: from which step to which.
        part = jnp.arange(parts, dtype=jnp.int32)[:, None]
        earliest, latest = first + (part - first) % parts, stop - 1 - (stop - 1 - part) % parts
        since, until = (x // parts - before + begin[:-1] for x in (earliest, latest))
        reached = (earliest <= latest)[:, None] & (since[:, None] <= step[:, None])
        held = jnp.max(jnp.where(reached, jnp.minimum(until[:, None], step[:, None]), 0), axis=2)
        held = jnp.concatenate([held, jnp.max(held, axis=0, keepdims=True)])
        groups = begin[::together]
        count, core = len(groups) - 1, jnp.arange(min(cores, heads // together) + 1)
        share = (core * begin[-1] + len(core) - 2) // (len(core) - 1)
        cuts = jnp.min(jnp.where(groups >= share[:, None], groups, begin[-1]), axis=1)
        cuts = jnp.clip(cuts, groups[core], groups[count + core - len(core) + 1])
        head = jnp.minimum(head, heads - 1)
        return cls(parts, most, first, stop, begin, head, held.reshape(-1), cuts.astype(jnp.int32))

    @property
    def scalars(self) -> tuple[Any, ...]:
        """The operands to prefetch."""
        return self.first, self.stop, self.begin, self.head, self.held, self.cuts

    @property
    def grid(self) -> tuple[Any, ...]:
        """The cores, and the steps of the core that has most."""
        return self.cuts.shape[0] - 1, jnp.max(self.cuts[1:] - self.cuts[:-1])

    def read(self, scalars: tuple[Any, ...]) -> Steps:
        """The same, as a kernel and its index maps see the prefetched operands."""
        names = "first", "stop", "begin", "head", "held", "cuts"
        return replace(self, **dict(zip(names, scalars, strict=True)))

    def step(self, core: Array, i: Array) -> Array:
        """Step i of a core. After the core's last step it is that step again."""
        return jnp.minimum(self.cuts[core] + i, self.cuts[core + 1] - 1)

    def idle(self, core: Array, i: Array) -> Array:
        """Whether i is after the core's last step."""
        return self.cuts[core] + i >= self.cuts[core + 1]

    def tile(self, step: Array) -> tuple[Array, Array]:
        """The head of a step, and the tile of its lane."""
        n = self.head[step]
        return n, div(self.first[n], self.parts) + step - self.begin[n]

    def fetched(self, step: Array, part: int | None = None) -> tuple[Array, Array]:
        """The head and the tile that are fetched for a part of this step, or for what is fetched by tile."""
        return self.tile(self.held[(self.parts if part is None else part) * self.most + step])

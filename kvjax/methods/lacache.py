"""LaCache (Shi et al., ICML 2025, arXiv 2507.14204): thins out the past, in each layer at other places.

The definition is that of the released code, in which layers l and l + 1 retain neighbouring tokens of each run.

Differences from the released code:

- A run is thinned out one token at a time, as tokens come in, so that the cache stays full. The released code removes
  run - keep tokens at once, and enlarges the cache by half of that number.
- A prompt is retained as if its tokens had come in one by one. The released code thins out prompts that need several
  sweeps by longer runs.
- Tokens keep their own positions by default. `positions="in_cache"` rotates keys to their place in the cache, as the
  released code does.
- The budget counts the entries that a query sees, itself included. The released code evicts after the query has
  attended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.policy import Moment, Needs, Policy, Protect, Score, check_integer

from .common.budgets import budget_of
from .common.refusals import check_by_entry
from .registry import preset


@dataclass(frozen=True)
class Ladder(Score):
    """Scores entries by when they leave: those that leave next below 0, the earlier the lower; others by position.

    What leaves next follows from how many entries have left, which is the next position less the occupancy. There is no
    state. While an allocated budget compares scores, they are positions.

    Attributes:
        sinks: the number of first entries that are no part of a run.
        recent: the number of last ones that are none.
        run: the number of consecutive entries of which `keep` stay.
        keep: at least 1, and less than `run`.
    """

    sinks: int
    recent: int
    run: int
    keep: int

    def __post_init__(self) -> None:
        check_integer("sinks", self.sinks, least=0)
        check_integer("keep", self.keep, least=1)
        check_integer("run", self.run, least=2)
        if self.keep >= self.run:
            raise ValueError(f"keep={self.keep} with run={self.run}: expected fewer than a run has")
        check_integer("recent", self.recent, least=self.run - self.keep - 1)

    @property
    def needs(self) -> Needs:
        return Needs(marks=frozenset({"signed", "ordinal"}), by_count=True)

    def check(self, policy: Policy) -> None:
        if policy.every not in (None, 1):
            raise ValueError(
                f"it says which entry leaves next; with every={policy.every} several leave at once, and they cannot be "
                "combined"
            )
        check_by_entry(policy, "scores entries by when they leave")

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        positions = entries.positions.astype(jnp.float32)
        if moment.counts is None:
            return positions
        held, counts = entries.positions >= 0, moment.counts
        occupancy = jnp.sum(held, axis=-1)
        order = jnp.argsort(jnp.where(held, entries.positions, jnp.iinfo(jnp.int32).max), axis=-1)
        rungs = self.run - self.keep  # entries of a run that leave
        offset = moment.layer.index % (rungs + 1)
        runs = jnp.maximum((counts - self.sinks - self.recent - 1) // self.keep, 1)  # of a sweep
        left = moment.next_position[:, None] - occupancy

        def sweep(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            """Finishes a sweep over the runs: when entries in order of position leave, -1 for those that stay."""
            stays, when, gone = carry
            run, before = jnp.divmod((left + gone) % (runs * rungs), rungs)
            first = self.sinks + run * self.keep
            early = jnp.minimum(before, offset)  # of the `before` that have left the run, those ahead of what it keeps
            place = jnp.cumsum(stays, axis=-1) - 1 - first[..., None]
            behind = place >= (offset - early + self.keep)[..., None]
            place = place + early[..., None] + jnp.where(behind, (before - early)[..., None], 0)
            number, place_in_run = jnp.divmod(place, self.run)
            leaves = (place_in_run < offset) | (place_in_run >= offset + self.keep)
            rung = jnp.where(place_in_run < offset, place_in_run, place_in_run - self.keep)
            nth = number * rungs + rung - before[..., None]
            count = jnp.minimum(wanted - gone, (runs - run) * rungs - before)
            leaves &= stays & (nth >= 0) & (nth < count[..., None])  # what has left, and sinks, would be below 0
            return stays & ~leaves, jnp.where(leaves, gone[..., None] + nth, when), gone + count

        wanted = jnp.maximum(occupancy - counts, 0) + 1
        inside = jnp.arange(entries.slots) < occupancy[..., None]
        begin = inside, jnp.full(inside.shape, -1), jnp.zeros_like(wanted)
        _, when, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[2] < wanted), sweep, begin)
        when = jnp.take_along_axis(when, jnp.argsort(order, axis=-1), axis=-1)
        return jnp.where(when >= 0, when.astype(jnp.float32) - (entries.slots + 1), positions)


@preset
def lacache(
    budget: int | float = 1024,
    run: int = 2,
    keep: int = 1,
    sinks: int = 4,
    recent: int = 32,
    positions: Literal["original", "in_cache"] = "original",
    every: int | None = 1,
) -> Policy:
    """Thins out the past: of each `run` consecutive entries `keep` stay, in each layer others.

    The cache is a list in order of position. When it is full, layer l reduces the first run behind the sinks to `keep`
    entries, from number l mod (run - keep + 1) of the run on. It then reduces the run behind these, and so on up to the
    `recent` last entries, and begins again at the sinks.

        score[c] = (entries that leave before c) - (slots + 1) if the sweep evicts c now, else position of c

    The oldest text is therefore thinned out most, and layers retain different tokens of it. The released span S and
    overlap O of a model of L layers are

        run = 1 + ceil((L - S) / (S - O)),    keep = min(ceil(S / (S - O)), run)

    Args:
        budget: the entries that a query sees, itself included. An integer >= 1, or a float in (0, 1] for that share of
            each row's prompt.
        run: the number of entries that are thinned out together (released: S = L / 2, O = 0, which is 2).
        keep: the number of them that stay, less than `run`.
        sinks: the number of first tokens, which are always retained (released: 4, and 128 for LongBench).
        recent: the number of most recent tokens, which are always retained (released: L), at least run - keep - 1.
        positions: "in_cache" is the released form: keys are cached before RoPE and rotated to their place in the cache.
            "original" keeps each token at its own position.
        every: 1, or None, which compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than sinks + recent + 1.
    """
    return Policy(
        score=Ladder(sinks, recent, run, keep),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
        positions=positions,
    )

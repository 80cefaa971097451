"""Block-wise selection, of KeyDiff (Park et al., arXiv 2504.15364) and kvpress's BlockPress: selects block by block.

Differences from the paper:

- The prompt is read at once, and only the selection goes block by block, as in kvpress. In the paper later tokens do
  not attend to what earlier blocks have lost, which is `chunk=` with `compress="chunk"` here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.cache import Slots, mark
from kvjax.pallas_kernels import top_tokens
from kvjax.policy import Moment, Needs, Policy, Score, ScoreWrapper, check_integer, check_kind

from .common.refusals import check_by_entry
from .keydiff import keydiff
from .registry import preset

KEYDIFF = keydiff()


@dataclass(frozen=True)
class BlockByBlock(ScoreWrapper):
    """The base's score among what is left of the blocks so far, so that a score that compares entries sees fewer.

    The first entries fill the number that a head retains. Each block of the next ones is then scored together with what
    was retained until then, and the best of both stay. Those that stay to the end score above all others. The score is
    the base's while an allocated budget compares scores (`Moment.counts` is None), and while decoding: the entries of a
    full head were all retained.

    Attributes:
        base: the score whose state and needs these are.
        block: the number of entries in a block.
    """

    block: int = 128

    def __post_init__(self) -> None:
        check_kind("base", self.base, Score)
        check_integer("block", self.block, least=1)

    @property
    def needs(self) -> Needs:
        needs = self.base.needs
        return replace(needs, slotwise=False, by_count=True, marks=needs.marks | {"decides"})

    def check(self, policy: Policy) -> None:
        super().check(policy)
        check_by_entry(policy, "scores the entries that stay above all others")

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        counts = moment.counts
        if counts is None or moment.leaving:
            return self.base(entries, moment)
        held = entries.positions >= 0
        last = jnp.iinfo(jnp.int32).max
        rank = jnp.argsort(jnp.argsort(jnp.where(held, entries.positions, last), axis=-1), axis=-1)
        first = counts[..., None]

        def scored(among: Bool[Array, "B H M"]) -> Float[Array, "B H M"]:
            positions = jnp.where(among, entries.positions, -1)
            scores = self.base(replace(entries, positions=positions), moment)
            if moment.protected is not None:
                scores = jnp.where(moment.protected, jnp.inf, scores)
            return jnp.where(among, scores, -jnp.inf)

        def add(i: Array, stays: Bool[Array, "B H M"]) -> Bool[Array, "B H M"]:
            begins = first + i * self.block
            among = held & (stays | ((rank >= begins) & (rank < begins + self.block)))
            best = top_tokens(scored(among), jnp.where(among, entries.positions, -1), counts, size=entries.slots)
            return mark(best, entries.slots) & among

        blocks = -(-entries.slots // self.block)  # the same on all devices, since a base may communicate
        stays = jax.lax.fori_loop(0, blocks, add, held & (rank < first))
        scores = self.base(entries, moment)
        finite = jnp.where(held & jnp.isfinite(scores), jnp.abs(scores), 0)
        above = 2 * jnp.max(finite, axis=-1, keepdims=True) + 1
        loses = jnp.any(held & ~stays, axis=-1, keepdims=True)  # or the sum would round small scores for nothing
        return jnp.where(stays & loses, scores + above, scores)


@preset
def blockwise(base: Policy = KEYDIFF, block: int = 128) -> Policy:
    """Selects by the base's scores block by block: what earlier blocks lose is not compared with later ones.

        retained = the first entries of the prompt, up to the budget
        for each block of the next ones: retained = the best of (retained + block) by the base's scores

    The base scores the retained set and the block as if there were no other entries.

    Args:
        base: the policy that defines scores, budget and protected tokens. A base that evicts while decoding (`every`)
            evicts by its own score.
        block: the number of tokens in a block.

    Raises:
        ValueError: for a value that is not accepted, and for a base whose selection compares chunks or pages by their
            mean scores.
    """
    check_kind("base", base, Policy)
    return replace(base, score=BlockByBlock(base.score, block))

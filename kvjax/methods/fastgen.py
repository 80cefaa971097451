"""FastGen (Ge et al., ICLR 2024, arXiv 2310.01801): retains in each head what recovers its attention, or everything.

Differences from the paper:

- A score knows positions, not tokens. The first `sinks` tokens take the place of the special tokens, and punctuation is
  no class of its own. The paper's sets also have the punctuation.
- What a set recovers is the share of the attention of all queries that it received. Section 4.1 reads equation 1 so.
- `budget` bounds the total, because the memory of a compiled program is fixed before the prompt is read. With
  budget=1.0 the recovery alone decides, and the cache has room for heads that retain everything. With less, the
  recovery is lowered until the total fits.
- Only the prompt is compressed. In the paper each head keeps to its set while decoding.
- The attention of a query group is averaged. The paper has one query head per kv head.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots, mark
from kvjax.mesh.heads import Heads
from kvjax.pallas_kernels import top_tokens
from kvjax.policy import AllocatedBudget, Layout, Moment, Needs, Policy, Protect, check_integer, share_of

from .common.accumulated import AccumulatedAttention
from .common.allocation import check_mean, check_share
from .common.budgets import budget_of
from .registry import preset

HALVINGS = 24  # of the interval in which the lowered recovery lies


@dataclass(frozen=True)
class AttentionClasses(AccumulatedAttention):
    """The class of an entry plus half of its share of the head's attention.

    The class is 3 for the first tokens, 2 for those that received the most attention, 1 for the most recent ones and 0
    for all others, so that the entries of a class and of those above it score above all others.
    """

    sinks: int = 4
    frequent: float = 0.3
    local: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("sinks", self.sinks, least=1)
        check_share("frequent", self.frequent)
        check_share("local", self.local)

    @property
    def needs(self) -> Needs:
        return Needs(received=super().needs.received, marks=frozenset({"classes", "ordinal"}))

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        received, held = super().__call__(entries, moment), entries.positions >= 0
        received = jnp.where(held, received, 0)
        shares = received / jnp.maximum(jnp.sum(received, axis=-1, keepdims=True), 1e-30)
        length = moment.next_position[:, None]
        number = jnp.broadcast_to(share_of(self.frequent, length), shares.shape[:2])
        ranked = jnp.where(held, received, -jnp.inf)
        frequent = mark(top_tokens(ranked, entries.positions, number, size=entries.slots), entries.slots)
        local = entries.positions >= (length - share_of(self.local, length))[..., None]
        kind = jnp.where(entries.positions < self.sinks, 3, jnp.where(frequent, 2, jnp.where(local, 1, 0)))
        return kind + shares / 2


@dataclass(frozen=True)
class RecoveringHeads(AllocatedBudget):
    """Each head retains the fewest classes of entries that have a share `recovery` of its attention, or everything.

    If that is more than the total of the mean heads, the recovery is the largest one, up to rounding, with which it
    fits. On a mesh nothing is communicated.

    Attributes:
        budget: entries of the mean head, the same for all layers.
        recovery: the share of the attention of all queries, from 0 to 1.
        groups: the number of groups of consecutive kv heads, each of which retains its own total. The number of devices
            that kv heads are divided over must divide it.
    """

    recovery: float
    groups: int = 1

    def __post_init__(self) -> None:
        check_share("recovery", self.recovery)
        check_integer("groups", self.groups, least=1)
        check_mean(self.budget)

    def check(self, policy: Policy) -> None:
        if "classes" not in policy.score.needs.marks:
            raise ValueError(
                f"it compares what classes of entries recover, and the score {type(policy.score).__name__} has no "
                "classes; they cannot be combined"
            )

    @property
    def layout(self) -> Layout:
        return Layout(groups=self.groups, compares_protected=True)

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        L, B, H, _ = scores.shape
        groups = self.groups // heads.kv_devices()
        kind = jnp.floor(scores)
        shares = jnp.where(scores > -jnp.inf, 2 * (scores - kind), 0)
        recovered = jnp.stack([jnp.sum(jnp.where(kind >= lowest, shares, 0), axis=-1) for lowest in (3, 2, 1)])
        retained = jnp.stack([jnp.sum(kind >= lowest, axis=-1) for lowest in (3, 2, 1, 0)])

        def counts(recovery: Float[Array, "B groups"]) -> Int[Array, "L B H"]:
            enough = recovered >= jnp.repeat(recovery, H // groups, axis=1)
            fewest = jnp.sum(~jnp.cumsum(enough, axis=0).astype(bool), axis=0)
            chosen = jnp.take_along_axis(retained, fewest[None], axis=0)[0]
            return jnp.minimum(jnp.maximum(chosen, least), retained[3])

        def fits(recovery: Float[Array, "B groups"]) -> Bool[Array, "B groups"]:
            total = jnp.sum(counts(recovery).reshape(L, B, groups, -1), axis=(0, 3))
            return total <= (jnp.sum(means, axis=0) * (H // groups))[:, None]

        def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low + high) / 2
            fit = fits(middle)
            return jnp.where(fit, middle, low), jnp.where(fit, high, middle)

        wanted = jnp.full((B, groups), self.recovery, jnp.float32)
        low, _ = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.zeros_like(wanted), wanted))
        return counts(jnp.where(fits(wanted), wanted, low))


@preset
def fastgen(
    budget: int | float = 1.0,
    recovery: float = 0.95,
    sinks: int = 4,
    frequent: float = 0.3,
    local: float = 0.3,
    groups: int = 1,
) -> Policy:
    """Compresses the prompt once: each head retains the smallest of four sets that recovers its attention.

    The frequent tokens received the most attention from all queries, and the local tokens are the newest. The sets are
    (equation 2, without punctuation)

        first,  first + frequent,  first + frequent + local,  all
        recovered[set] = (attention of all queries on the set) / (attention of all queries)
        head h retains the first set with recovered[set] >= recovery

    Sections 3.3 and 4.1 of the paper describe this. Heads are compressed also if the prompt is within the budget. The
    answer is added to the retained entries.

    Args:
        budget: the most entries that the mean kv head retains; the recovery is lowered until it is met. An integer
            >= 1, or a float in (0, 1] for that share of each row's prompt; 1.0 leaves it to the recovery.
        recovery: the paper's T, the share of attention that a set must recover, from 0 to 1.
        sinks: the number of first tokens, which are always retained and take the place of the special tokens, at least
            1.
        frequent: the paper's r_f, the share of the prompt that counts as frequent, from 0 to 1.
        local: the paper's r_l, the share of the prompt that counts as local, from 0 to 1.
        groups: the number of groups of consecutive kv heads that share a total. On a mesh that divides kv heads over D
            devices it must be a multiple of D.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than sinks + 1.
    """
    return Policy(
        score=AttentionClasses(sinks=sinks, frequent=frequent, local=local),
        budget=RecoveringHeads(budget_of(budget), recovery, groups),
        protect=Protect(sinks=sinks),
    )

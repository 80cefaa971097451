"""KVMerger's merge: each set of similar neighbours becomes one entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots, mark
from kvjax.checks import is_number, shown
from kvjax.pallas_kernels import compact, top_tokens
from kvjax.policy import Effects, Keep, Merge, Moment, Policy, Ranked, check_choice, check_integer, share_of

from ..common.by_position import RandomDraw
from ..common.in_place import changed_if
from .cluster import Rule, set_ends, solve_theta

LEAST_SIGMA = 1e-6  # whose square is a number of float32 above 0


@dataclass(frozen=True)
class GaussianMerge(Merge):
    """Replaces each set of similar neighbours by one entry, a mean around the most important of them (KVMerger).

    The entries that are neither protected nor among the `heavy` highest scores are cut into sets of consecutive tokens
    (`cluster.py`). The pivot p of a set is its highest score, of equal scores the earlier. With
    g_i = exp(-|k_p - k_i|^2 / 2 sigma^2) the entry at p becomes key sum g_i k_i / sum g_i and value
    sum g_i v_i / sum g_i, and the others leave. A head that is within its budget is left as it is.

    While decoding, a full head merges its entries by the same rules. If the sets are still too many, those with the
    lowest scores at their pivots are dropped, so that each such merge frees `Policy.every` slots or more. A merged
    entry counts as one token in later merges. The merge communicates nothing between devices.

    Attributes:
        heavy: the number of highest scores that are retained unmerged; a float in [0, 1) is that share of the capacity.
            The paper's 12 % and 2 % of the prompt are 0.24 of a budget of 0.5 and 0.057 of 0.35.
        theta: the threshold, a cosine in [-1, 1]. Neighbours with a cosine above it are merged. It does not guarantee
            the budget: if there are more sets than fit, those with the lowest scores at their pivots are dropped; if
            there are fewer, slots stay empty. None gives each head its own, the largest theta that meets the budget.
        rule: which cosine counts: that with the last token of the set ("anchor", Algorithm 1), or that of neighbours
            ("chain", as section 4.2 reads).
        straddle: whether sets reach across tokens that are retained unmerged (Algorithm 1's compacted list), instead of
            ending there (Definition 5.1, "consecutive").
        sigma: "mean" is the mean distance between the pivot and the others of the set (section 6.3); "rms" the root of
            their mean square distance / sqrt 2, so that 2 sigma^2 is the mean square distance; "eq7" the sum of square
            distances / (sqrt 2 * size of the set) (equation 7); or a number > 0 (Table 5: 1, 3, 6). Sets of equal keys
            are averaged.
        weights: "gauss", or "average", which is g = 1 (the ablation of Table 4).
        pivot: "score", or "random", which is RandomDraw of the `seed` (the ablation of Table 3).
        seed: the seed of random pivots, an integer >= 0.
        count_bias: whether ln n is added to the logits of an entry of n tokens, which the paper does not do, so that it
            receives what they received together, if their keys were equal. It takes 4 bytes per slot. Without it, the
            entry weighs as one token.

    Raises:
        ValueError: for a value that is not accepted.
    """

    heavy: int | float = 0.24
    theta: float | None = 0.75
    rule: Rule = "anchor"
    straddle: bool = False
    sigma: Literal["mean", "rms", "eq7"] | float = "mean"
    weights: Literal["gauss", "average"] = "gauss"
    pivot: Literal["score", "random"] = "score"
    seed: int = 0
    count_bias: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.heavy, float):
            check_integer("heavy", self.heavy, least=0)
        elif not 0 <= self.heavy < 1:
            raise ValueError(f"heavy={self.heavy}: expected an integer >= 0, or a float in [0, 1) for a share")
        if self.theta is not None and not (is_number(self.theta) and -1 <= self.theta <= 1):
            raise ValueError(f"theta={shown(self.theta)}: expected a cosine in [-1, 1], or None to meet the budget")
        if not (self.sigma > 0 if is_number(self.sigma) else self.sigma in ("mean", "rms", "eq7")):
            raise ValueError(f"sigma={shown(self.sigma)}: expected 'mean', 'rms', 'eq7' or a finite number above 0")
        check_choice("rule", self.rule, *get_args(Rule))
        check_choice("weights", self.weights, "gauss", "average")
        check_choice("pivot", self.pivot, "score", "random")
        check_integer("seed", self.seed, least=0)

    @property
    def effects(self) -> Effects:
        return Effects(at_prompt=True, at_steps=True, keys=True, bias=self.count_bias)

    def check(self, policy: Policy) -> None:
        recent, smallest = policy.protect.recent, policy.budget.smallest
        shares = [x for x in (self.heavy, recent) if isinstance(x, float)]
        entries = [x for x in (self.heavy, recent, policy.protect.sinks) if isinstance(x, int)]
        unmerged = sum(entries) + (policy.every or 0)
        if sum(shares) >= 1 or (smallest is not None and unmerged >= smallest * (1 - sum(shares))):
            raise ValueError(
                f"heavy={self.heavy}, sinks={policy.protect.sinks}, recent={recent} and every={policy.every} leave "
                f"nothing to merge into of {policy.budget}: expected shares of less than 1 together, and a budget "
                "larger than heavy + sinks + recent + every"
            )

    def compress(
        self, entries: Slots, moment: Moment, ranked: Ranked, keep: Keep
    ) -> tuple[Slots, Int[Array, "B H size"]]:
        scores, heavy = ranked.scores, self._heavy(ranked.counts)
        merged = self._merged(entries, moment, scores, scores == jnp.inf, heavy, ranked.counts)
        return merged, keep(ranked._replace(positions=merged.positions))

    def absorb(
        self, entries: Slots, moment: Moment, scores: Float[Array, "B H S"], lost: Bool[Array, "B H S"], count: int
    ) -> tuple[Slots, Bool[Array, "B H S"]]:
        assert moment.protected is not None
        protected, full = moment.protected, jnp.any(lost, axis=-1)
        counts = jnp.minimum(entries.capacity, entries.slots)
        room = jnp.where(full, counts - count, entries.slots)

        def merge(before: Slots) -> Slots:
            after = self._merged(before, moment, scores, protected, self._heavy(counts), room)
            ranked = jnp.where(protected, jnp.inf, scores)
            ranked = jnp.where(after.positions >= 0, ranked, -jnp.inf)
            stays = mark(top_tokens(ranked, after.positions, room, size=after.slots), after.slots)
            return replace(after, positions=jnp.where(stays, after.positions, -1))

        merged = changed_if(jnp.any(full), merge, entries.without_state())
        lost = merged.positions != entries.positions
        return replace(entries, keys=merged.keys, values=merged.values, bias=merged.bias), lost

    def _heavy(self, counts: Int[Array, "B H"]) -> Int[Array, "B H"]:
        """Returns the number of heavy hitters of heads that retain `counts` entries."""
        if isinstance(self.heavy, float):
            return share_of(self.heavy, counts)
        return jnp.full(counts.shape, self.heavy)

    def _merged(
        self,
        entries: Slots,
        moment: Moment,
        scores: Float[Array, "B H M"],
        protected: Bool[Array, "B H M"],
        heavy: Int[Array, "B H"],
        room: Int[Array, "B H"],
    ) -> Slots:
        """Merges entries in the heads that hold more than `room`, and empties those that are merged into others."""
        there, M = entries.positions >= 0, entries.slots
        free = jnp.maximum(room - jnp.sum(protected, axis=-1), 0)
        ranked = jnp.where(there & ~protected, scores, -jnp.inf)
        heaviest = mark(top_tokens(ranked, entries.positions, jnp.minimum(jnp.minimum(heavy, free), M), size=M), M)
        kept = there & (protected | heaviest | (entries.occupancy <= room)[..., None])
        packing = Packing.of(entries.positions, there & ~kept)
        keys, values = (packing.pack(x).astype(jnp.float32) for x in (entries.keys, entries.values))
        unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-30)
        sections = jnp.zeros_like(packing.slot) if self.straddle else packing.pack(packing.before(kept))
        n, room = packing.counts, room - jnp.sum(kept, axis=-1)
        if self.theta is None:
            theta = solve_theta(unit, sections, n, room, self.rule)
        else:
            theta = jnp.full(n.shape, self.theta, jnp.float32)
        ends = set_ends(unit, sections, n, theta, self.rule)
        sets = jnp.cumsum(ends, axis=-1) - ends
        rank = packing.pack(scores if self.pivot == "score" else RandomDraw(self.seed)(entries, moment))
        weights, is_pivot = self._weigh(keys, rank, sets, packing.slot >= 0)
        stays = kept | packing.unpack(is_pivot)
        own = packing.unpack(sets)

        def put(x: Array, packed: Array) -> Array:
            """Returns the sum of `packed` over its set, in the slot of each entry that is not retained unmerged."""
            index, changed = (y.reshape(*y.shape, *(1,) * (x.ndim - 3)) for y in (own, there & ~kept))
            sums = _sums(packed, sets)
            return jnp.where(changed, jnp.take_along_axis(sums, index, axis=2).astype(x.dtype), x)

        bias = entries.bias
        if bias is not None:  # an entry stands for e to the power of its bias tokens
            tokens = put(jnp.ones_like(bias), (packing.slot >= 0) * jnp.exp(packing.pack(bias)))
            bias = jnp.where(there & ~kept, jnp.log(tokens), bias)
        return replace(
            entries,
            keys=put(entries.keys, weights[..., None] * keys),
            values=put(entries.values, weights[..., None] * values),
            positions=jnp.where(stays, entries.positions, -1),
            bias=bias,
        )

    def _weigh(
        self,
        keys: Float[Array, "B H N D"],
        rank: Float[Array, "B H N"],
        sets: Int[Array, "B H N"],
        there: Bool[Array, "B H N"],
    ) -> tuple[Float[Array, "B H N"], Bool[Array, "B H N"]]:
        """Returns the weight of each token in its set, and whether it is the pivot. Sets have ascending numbers."""
        N = keys.shape[2]
        over_set = partial(_over_sets, sets=sets)
        rank = jnp.where(there, rank, -jnp.inf)
        first = jnp.where(rank == over_set(jax.ops.segment_max, rank), jnp.arange(N), N)
        pivot = over_set(jax.ops.segment_min, first)
        is_pivot = there & (pivot == jnp.arange(N))
        if self.weights == "average":
            g = there.astype(jnp.float32)
        else:
            pivot_keys = jnp.take_along_axis(keys, jnp.minimum(pivot, N - 1)[..., None], axis=2)
            square = jnp.where(there, jnp.sum((pivot_keys - keys) ** 2, axis=-1), 0.0)
            g = there * jnp.exp(-square / (2 * self._sigma(square, there, over_set) ** 2))
        return g / jnp.maximum(over_set(jax.ops.segment_sum, g), 1e-30), is_pivot

    def _sigma(
        self, square: Float[Array, "B H N"], there: Bool[Array, "B H N"], over_set: Callable[..., Array]
    ) -> Float[Array, "B H N"]:
        """Returns sigma of each token's set, from the square distances of its tokens to its pivot."""
        if not isinstance(self.sigma, str):
            return jnp.full(square.shape, max(self.sigma, LEAST_SIGMA), jnp.float32)
        tokens = over_set(jax.ops.segment_sum, there.astype(jnp.float32))
        others = jnp.maximum(tokens - 1, 1)
        if self.sigma == "mean":
            sigma = over_set(jax.ops.segment_sum, jnp.sqrt(square)) / others
        elif self.sigma == "rms":
            sigma = jnp.sqrt(over_set(jax.ops.segment_sum, square) / others / 2)
        else:
            sigma = over_set(jax.ops.segment_sum, square) / (jnp.sqrt(2.0) * jnp.maximum(tokens, 1))
        return jnp.maximum(sigma, LEAST_SIGMA)


class Packing(NamedTuple):
    """Some entries of each head side by side in order of position, whatever slots they are in.

    Attributes:
        slot: the slot of each packed entry, -1 after the last.
        place: where each slot's entry is packed, or the place of the last packed entry before it.
        order: all slots in order of position, empty ones first.
    """

    slot: Int[Array, "B H M"]
    place: Int[Array, "B H M"]
    order: Int[Array, "B H M"]

    @classmethod
    def of(cls, positions: Int[Array, "B H M"], members: Bool[Array, "B H M"]) -> Packing:
        """Packs the members, which must not be empty slots."""
        slots = jnp.broadcast_to(jnp.arange(positions.shape[-1]), positions.shape)
        in_order = jnp.all(positions[..., 1:] >= positions[..., :-1])  # as after a prompt, which need not be sorted
        order = jax.lax.cond(in_order, lambda: slots, lambda: jnp.argsort(positions, axis=-1))
        members = jnp.take_along_axis(members, order, axis=-1)
        packed = compact(members, members.shape[-1])
        index = jnp.where(packed >= 0, jnp.take_along_axis(order, jnp.maximum(packed, 0), axis=-1), -1)
        place = _to_slots(jnp.maximum(jnp.cumsum(members, axis=-1) - 1, 0), order)
        return cls(index, place, order)

    @property
    def counts(self) -> Int[Array, "B H"]:
        """The number of packed entries."""
        return jnp.sum(self.slot >= 0, axis=-1)

    def pack(self, x: Array) -> Array:
        """Gathers the slots' axis 2 for each packed entry, with 0 after the last."""
        index = self.slot.reshape(*self.slot.shape, *(1,) * (x.ndim - 3))
        return jnp.where(index >= 0, jnp.take_along_axis(x, jnp.maximum(index, 0), axis=2), 0)

    def unpack(self, x: Array) -> Array:
        """Returns the value of each slot's packed entry. The values of slots that are not packed are undefined."""
        return jnp.take_along_axis(x, self.place, axis=-1)

    def before(self, marked: Bool[Array, "B H M"]) -> Int[Array, "B H M"]:
        """Returns the number of marked entries up to each slot's in order of position."""
        return _to_slots(jnp.cumsum(jnp.take_along_axis(marked, self.order, axis=-1), axis=-1), self.order)


def _to_slots(x: Int[Array, "B H M"], order: Int[Array, "B H M"]) -> Int[Array, "B H M"]:
    """Scatters position-ordered values back to slot order."""
    b, h = jnp.arange(order.shape[0])[:, None, None], jnp.arange(order.shape[1])[:, None]
    return jnp.zeros_like(x).at[b, h, order].set(x, unique_indices=True)


def _sums(x: Float[Array, "B H N ..."], sets: Int[Array, "B H N"]) -> Float[Array, "B H N ..."]:
    """Returns the sum over each set."""
    # Without the barrier XLA sets aside these zeros, which depend on nothing, for each layer when the program begins.
    zeros, x = jax.lax.optimization_barrier((jnp.zeros_like(x), x))
    row, head = jnp.arange(sets.shape[0])[:, None, None], jnp.arange(sets.shape[1])[:, None]
    return zeros.at[row, head, sets].add(x, indices_are_sorted=True)


def _reduce(reduce: Callable[..., Array], x: Array, sets: Int[Array, "B H N"]) -> Array:
    """Returns a reduction over each set."""
    over = partial(reduce, num_segments=sets.shape[-1] + 1, indices_are_sorted=True)
    return jax.vmap(jax.vmap(over))(x, sets)


def _over_sets(reduce: Callable[..., Array], x: Float[Array, "B H N"], sets: Int[Array, "B H N"]) -> Array:
    """Reduces over the set of every token."""
    return jnp.take_along_axis(_reduce(reduce, x, sets), sets, axis=-1)

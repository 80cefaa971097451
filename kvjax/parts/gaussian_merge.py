"""KVMerger's merge: sets of similar neighbours become one entry each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeGuard, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import LayerCache
from kvjax.pallas_kernels import compact, top_tokens
from kvjax.policy import Policy, mark
from kvjax.protocols import Merge, Moment, check_integer

from .cluster import Rule, set_ends, solve_theta
from .keys import RandomDraw


@dataclass(frozen=True)
class GaussianMerge(Merge):
    """Sets of similar neighbours become one entry each, a mean around the most important of them (KVMerger).

    What is neither protected nor among the `heavy` best scores is cut into sets of consecutive tokens (`cluster.py`). A
    set's pivot p is its highest score, of equal ones the earlier, and with g_i = exp(-|k_p - k_i|^2 / 2 sigma^2) the
    entry at p becomes key sum g_i k_i / sum g_i and value sum g_i v_i / sum g_i; the others are emptied. A head that is
    within its budget is left as it is. It communicates nothing.

    Attributes:
        heavy: the highest scores that are kept as they are, a number or, as a float, that share of the capacity.
        theta: neighbours with a cosine above it are merged; None: each head its own, the largest that meets the budget.
            With a fixed one, sets beyond the budget are dropped by their pivots' scores.
        rule: whose cosine counts, that with the set's last token ("anchor") or that of neighbours ("chain").
        straddle: whether sets reach across tokens that are kept.
        sigma: "mean" distance to the pivot of the others of the set; "rms", the root of their mean square distance /
            sqrt 2; "eq7", the sum of square distances / (sqrt 2 * tokens of the set); or a number. A set of equal keys
            is averaged.
        weights: "gauss", or "average": g = 1.
        pivot: "score", or "random", RandomDraw of the `seed`.
        count_bias: an entry of n tokens gets ln n added to its logits, so that it receives what they did together, were
            their keys the same. Without, it weighs as one token.
    """

    heavy: int | float = 0
    theta: float | None = None
    rule: Rule = "anchor"
    straddle: bool = False
    sigma: Literal["mean", "rms", "eq7"] | float = "mean"
    weights: Literal["gauss", "average"] = "gauss"
    pivot: Literal["score", "random"] = "score"
    seed: int = 0
    count_bias: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.heavy, float):
            if not 0 <= self.heavy < 1:
                raise ValueError(f"heavy={self.heavy}: accepted are an integer >= 0 or, for a share, a float in [0, 1)")
        else:
            check_integer("heavy", self.heavy, least=0)
        if self.theta is not None and not (_is_number(self.theta) and -1 <= self.theta <= 1):
            raise ValueError(f"theta={self.theta!r}: accepted are a cosine in [-1, 1], or None to meet the budget")
        if not (self.sigma > 0 if _is_number(self.sigma) else self.sigma in ("mean", "rms", "eq7")):
            raise ValueError(f"sigma={self.sigma!r}: accepted are 'mean', 'rms', 'eq7' and a number above 0")
        for name, accepted in (
            ("rule", get_args(Rule)),
            ("weights", ("gauss", "average")),
            ("pivot", ("score", "random")),
        ):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name}={getattr(self, name)!r}: accepted are {' and '.join(map(repr, accepted))}")
        check_integer("seed", self.seed, least=0)

    @property
    def changes_keys(self) -> bool:
        return True

    @property
    def biases(self) -> bool:
        return self.count_bias

    def check(self, policy: Policy) -> None:
        if policy.every is not None:
            raise ValueError(
                f"GaussianMerge needs neighbouring tokens side by side, and every={policy.every} overwrites slots in "
                "any order; they cannot be combined"
            )
        recent, smallest = policy.protect.recent, policy.budget.smallest
        shares = [x for x in (self.heavy, recent) if isinstance(x, float)]
        entries = [x for x in (self.heavy, recent, policy.protect.sinks) if isinstance(x, int)]
        if sum(shares) >= 1 or (smallest is not None and sum(entries) >= smallest * (1 - sum(shares))):
            raise ValueError(
                f"heavy={self.heavy} and {policy.protect} leave nothing to merge into of {policy.budget}; accepted are "
                "shares of less than 1 together, and a budget beyond what is kept as it is"
            )

    def condense(
        self, entries: LayerCache, moment: Moment, scores: Float[Array, "B H M"], counts: Int[Array, "B H"], size: int
    ) -> LayerCache:
        there, protected = entries.positions >= 0, scores == jnp.inf
        kept = protected | self._heaviest(jnp.where(protected, -jnp.inf, scores), entries, counts, size)
        packed = compact(there & ~kept, entries.slots)
        n = jnp.sum(packed >= 0, axis=-1)

        def pack(x: Array) -> Array:
            index = packed.reshape(*packed.shape, *(1,) * (x.ndim - 3))
            return jnp.where(index >= 0, jnp.take_along_axis(x, jnp.maximum(index, 0), axis=2), 0)

        keys, values = (pack(x).astype(jnp.float32) for x in (entries.keys, entries.values))
        unit = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-30)
        sections = pack(jnp.zeros_like(packed) if self.straddle else jnp.cumsum(kept, axis=-1))
        room = counts - jnp.sum(kept, axis=-1)
        if self.theta is None:
            theta = solve_theta(unit, sections, n, room, self.rule)
        else:
            theta = jnp.full(n.shape, self.theta, jnp.float32)
        ends = set_ends(unit, sections, n, jnp.where(n <= room, 2.0, theta), self.rule)
        sets = jnp.cumsum(ends, axis=-1) - ends
        rank = pack(scores if self.pivot == "score" else RandomDraw(self.seed)(entries, moment))
        weights, is_pivot = self._weigh(keys, rank, sets, packed >= 0)
        place = jnp.maximum(jnp.cumsum(there & ~kept, axis=-1) - 1, 0)
        stays = kept | jnp.take_along_axis(is_pivot, place, axis=-1)
        own = jnp.take_along_axis(sets, place, axis=-1)

        def put(x: Array, packed: Array) -> Array:
            """The sum over its set of what is packed, at each slot that is not kept as it is."""
            index, free = (y.reshape(*y.shape, *(1,) * (x.ndim - 3)) for y in (own, there & ~kept))
            sums = _sums(packed, sets)
            return jnp.where(free, jnp.take_along_axis(sums, index, axis=2).astype(x.dtype), x)

        bias = entries.bias
        if bias is not None:  # the tokens of an entry are e to the power of its bias
            tokens = put(jnp.ones_like(bias), (packed >= 0) * jnp.exp(pack(bias)))
            bias = jnp.where(there & ~kept, jnp.log(tokens), bias)
        return replace(
            entries,
            keys=put(entries.keys, weights[..., None] * keys),
            values=put(entries.values, weights[..., None] * values),
            positions=jnp.where(stays, entries.positions, -1),
            bias=bias,
        )

    def _heaviest(
        self, scores: Float[Array, "B H M"], entries: LayerCache, counts: Int[Array, "B H"], size: int
    ) -> Bool[Array, "B H M"]:
        if isinstance(self.heavy, float):
            most = math.floor(size * self.heavy + 1e-4)
            wanted = jnp.floor(counts * self.heavy + 1e-4).astype(jnp.int32)
        else:
            most, wanted = min(self.heavy, size), jnp.full(counts.shape, self.heavy)
        free = counts - jnp.sum((entries.positions >= 0) & (scores == -jnp.inf), axis=-1)
        chosen = top_tokens(scores, entries.positions, jnp.clip(wanted, 0, jnp.minimum(free, most)), size=most)
        return mark(chosen, entries.slots)

    def _weigh(
        self,
        keys: Float[Array, "B H N D"],
        rank: Float[Array, "B H N"],
        sets: Int[Array, "B H N"],
        there: Bool[Array, "B H N"],
    ) -> tuple[Float[Array, "B H N"], Bool[Array, "B H N"]]:
        """Each token's weight in its set, and whether it is the pivot. Sets are numbered in ascending order."""
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
        """From the square distances of a set's tokens to its pivot."""
        if not isinstance(self.sigma, str):
            return jnp.full(square.shape, self.sigma, jnp.float32)
        tokens = over_set(jax.ops.segment_sum, there.astype(jnp.float32))
        others = jnp.maximum(tokens - 1, 1)
        if self.sigma == "mean":
            sigma = over_set(jax.ops.segment_sum, jnp.sqrt(square)) / others
        elif self.sigma == "rms":
            sigma = jnp.sqrt(over_set(jax.ops.segment_sum, square) / others / 2)
        else:
            sigma = over_set(jax.ops.segment_sum, square) / (jnp.sqrt(2.0) * jnp.maximum(tokens, 1))
        return jnp.maximum(sigma, 1e-6)


def _sums(x: Float[Array, "B H N ..."], sets: Int[Array, "B H N"]) -> Float[Array, "B H N ..."]:
    """Over each set."""
    # Zeros to add to depend on nothing: for each layer XLA would set them aside when the program begins.
    zeros, x = jax.lax.optimization_barrier((jnp.zeros_like(x), x))
    row, head = jnp.arange(sets.shape[0])[:, None, None], jnp.arange(sets.shape[1])[:, None]
    return zeros.at[row, head, sets].add(x, indices_are_sorted=True)


def _reduce(reduce: Callable[..., Array], x: Array, sets: Int[Array, "B H N"]) -> Array:
    """Over each set."""
    over = partial(reduce, num_segments=sets.shape[-1] + 1, indices_are_sorted=True)
    return jax.vmap(jax.vmap(over))(x, sets)


def _over_sets(reduce: Callable[..., Array], x: Float[Array, "B H N"], sets: Int[Array, "B H N"]) -> Array:
    """Reduces over each set, and tells every token of it."""
    return jnp.take_along_axis(_reduce(reduce, x, sets), sets, axis=-1)


def _is_number(x: object) -> TypeGuard[float]:
    return isinstance(x, int | float) and not isinstance(x, bool)

"""Attention Matching (Zweiger et al., arXiv 2602.16284): fits biases and values of retained entries to all entries.

`docs/results/smollm2.md` has the measurements behind the defaults.

Differences from the paper and its code:

- Queries are a sample of the prompt's own, turned to the position after it. The paper generates them by letting the
  model repeat or study the text.
- Any policy selects the keys. The paper takes those with the most attention or a greedy pursuit.
- Entries that the policy protects stay as they are.
- Both least-squares problems are solved by their ridge solutions around the unchanged entry, so that what no query
  attends to stays as it is. The paper clamps plain least squares, which is ridge=0 if there are at least as many
  queries as entries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots
from kvjax.models import rotate
from kvjax.pallas_kernels import capped, finite_or_zero
from kvjax.pallas_kernels.matrices import solve_positive
from kvjax.policy import Effects, Keep, Merge, Moment, Policy, Ranked, check_kind, check_number

from .common.query_sample import QuerySample, sample_of
from .common.refusals import check_own_positions
from .registry import preset
from .snapkv import snapkv

SNAPKV = snapkv()
FARTHEST = 80.0  # a bound beyond which e to the power of it, or of its negative, is no normal number of float32


class Fit(NamedTuple):
    """The problem of one head: what n queries would get from M entries, of which t are retained."""

    queries: Float[Array, "n D"]
    asks: Bool[Array, "n"]
    keys: Float[Array, "M D"]
    values: Float[Array, "M D"]
    logits: Float[Array, "M"]
    kept: Int[Array, "t"]
    free: Bool[Array, "t"]


@dataclass(frozen=True)
class FittedEntries(Merge):
    """Entries that are not retained are dropped, and biases and values of the others are fitted to make up for them.

    For the queries of the score's sample, turned to the position after the prompt, biases fit the sum of the exponents
    of all logits, then values fit the output. Entries that are protected take part, and stay as they are. A head that
    loses nothing stays as it is. Decoding drops what it evicts.

    Attributes:
        bias: whether biases are fitted; if not, they are 0 and only values are fitted.
        ridge: the weight of the change itself, as a share of the mean squared column of the problem.
        bound: the largest bias and the negative of the smallest.
    """

    bias: bool = True
    ridge: float = 1.0
    bound: float = 3.0

    def __post_init__(self) -> None:
        check_number("ridge", self.ridge, "a number > 0", lambda x: x > 0)
        check_number("bound", self.bound, "a number > 0", lambda x: x > 0)

    @property
    def effects(self) -> Effects:
        return Effects(at_prompt=True, bias=True)

    def check(self, policy: Policy) -> None:
        if "samples" not in policy.score.needs.marks:
            raise ValueError(
                f"it asks a sample of queries, and the score {type(policy.score).__name__} takes none; expected a "
                "score within QuerySample"
            )
        check_own_positions(policy, "asks cached keys with queries at the next position")

    def compress(
        self, entries: Slots, moment: Moment, ranked: Ranked, keep: Keep
    ) -> tuple[Slots, Int[Array, "B H size"]]:
        kept = keep(ranked)
        B, H, M = entries.positions.shape
        fit = self._problems(entries, moment, kept, ranked.scores)
        flat = jax.tree.map(lambda x: x.reshape(B * H, *x.shape[2:]), fit)
        bias, values = jax.lax.map(partial(self._solved, softcap=moment.layer.softcap), flat, batch_size=H)
        loses = (jnp.sum(entries.positions >= 0, axis=-1) > ranked.counts)[..., None]
        b, h = jnp.arange(B)[:, None, None], jnp.arange(H)[:, None]
        place = b, h, jnp.where((kept >= 0) & fit.free & loses, kept, M)
        values = values.reshape(B, H, ranked.size, -1).astype(entries.values.dtype)
        values = entries.values.at[place].set(values, mode="drop")
        old = jnp.zeros((B, H, M)) if entries.bias is None else entries.bias
        return replace(entries, values=values, bias=old.at[place].add(bias.reshape(kept.shape), mode="drop")), kept

    def _problems(
        self, entries: Slots, moment: Moment, kept: Int[Array, "B H t"], scores: Float[Array, "B H M"]
    ) -> Fit:
        """Returns the problem of every head, in arrays with axes [B, H, ...]."""
        sample = sample_of(entries)
        B, H, R = sample.positions.shape
        behind = jnp.where(sample.positions >= 0, moment.next_position[:, None, None] - sample.positions, 0)
        group = sample.queries.shape[1] // H
        D = sample.queries.shape[-1]
        frequencies = moment.layer.rope.frequencies_of(D, moment.rope)
        turned = rotate(sample.queries.astype(jnp.float32), jnp.repeat(behind, group, axis=1), frequencies, 1.0)
        seen = entries.positions >= 0
        if moment.window is not None:
            seen &= entries.positions > moment.next_position[:, None, None] - moment.window
        protected = jnp.take_along_axis(jnp.isposinf(scores), jnp.maximum(kept, 0), axis=-1)
        return Fit(
            turned.reshape(B, H, group * R, D) * moment.scale,
            jnp.tile(sample.positions >= 0, (1, 1, group)),
            entries.keys.astype(jnp.float32),
            entries.values.astype(jnp.float32),
            jnp.where(seen, 0.0 if entries.bias is None else entries.bias, -jnp.inf),
            kept,
            (kept >= 0) & ~protected,
        )

    def _solved(self, fit: Fit, softcap: float | None) -> tuple[Float[Array, "t"], Float[Array, "t D"]]:
        """Returns the biases to add, and the values."""
        logits = capped(jnp.einsum("nD,MD->nM", fit.queries, fit.keys, precision="highest"), softcap) + fit.logits
        top = jnp.max(logits, axis=-1, keepdims=True)
        weights = jnp.where(fit.asks[:, None], jnp.exp(logits - finite_or_zero(top)), 0)
        mass = jnp.sum(weights, axis=-1)
        output = jnp.einsum("nM,MD->nD", weights, fit.values, precision="highest") / jnp.maximum(mass, 1e-30)[:, None]
        own = jnp.where(fit.kept >= 0, jnp.take(weights, jnp.maximum(fit.kept, 0), axis=1), 0)
        factor = jnp.ones(fit.kept.shape)
        if self.bias:
            missing = (mass - jnp.sum(own, axis=-1))[:, None]
            change = self._ridge(jnp.where(fit.free, own, 0), missing)[:, 0]
            largest = math.exp(min(self.bound, FARTHEST))
            factor = jnp.where(fit.free, jnp.clip(1 + change, 1 / largest, largest), 1)
        shares = own * factor
        shares /= jnp.maximum(jnp.sum(shares, axis=-1, keepdims=True), 1e-30)
        values = jnp.take(fit.values, jnp.maximum(fit.kept, 0), axis=0)
        missing = output - jnp.einsum("nt,tD->nD", shares, values, precision="highest")
        return jnp.log(factor), values + self._ridge(jnp.where(fit.free, shares, 0), missing)

    def _ridge(self, x: Float[Array, "n t"], y: Float[Array, "n K"]) -> Float[Array, "t K"]:
        """Returns the c that minimises |x c - y|^2 + ridge * (mean squared column of x) * |c|^2."""
        n, t = x.shape
        columns = jnp.sum(x**2, axis=0)
        weight = self.ridge * jnp.sum(columns) / jnp.maximum(jnp.sum(columns > 0), 1) + 1e-30
        across = x if n < t else x.T  # with fewer rows than columns c = x^T a, by a smaller system
        system = _product(across, across.T) + weight * jnp.eye(len(across))

        def refined(a: Float[Array, "s K"]) -> Float[Array, "s K"]:
            c = _product(x.T, a) if n < t else a
            missing = y - _product(x, c)
            return a + _solution(system, (missing if n < t else _product(x.T, missing)) - weight * a)

        # The second step restores digits that the first one loses by the condition of the system.
        a = refined(refined(jnp.zeros((len(across), y.shape[1]))))
        return _product(x.T, a) if n < t else a


def _product(a: Float[Array, "M I"], b: Float[Array, "I O"]) -> Float[Array, "M O"]:
    return jnp.matmul(a, b, precision="highest")


def _solution(a: Float[Array, "n n"], b: Float[Array, "n K"]) -> Float[Array, "n K"]:
    """`solve_positive`, which JAX can differentiate by b, as `kvjax.inspection` does."""
    return jax.lax.custom_linear_solve(partial(_product, a), b, lambda _, y: solve_positive(a, y), symmetric=True)


FITTED = FittedEntries()


@preset
def attention_matching(
    base: Policy = SNAPKV, queries: int = 256, seed: int = 0, merge: FittedEntries = FITTED
) -> Policy:
    """Retains what the base retains, and fits biases and values of these entries to the attention over all entries.

    With q a sample of the prompt's queries, C the retained entries and w_c = exp(bias_c), of head h

        w = argmin sum over q of (sum over c in C of w_c exp(q . k_c) - sum over all j of exp(q . k_j))^2
        v = argmin sum over q of |softmax over C of (q . k + log w) v - softmax over all (q . k) v|^2

    The answer is added to the retained entries, or evicts as the base does.
    `attention_matching:base=snapkv,merge.bias=False` fits values alone.

    Args:
        base: the policy that defines scores, budget and protected tokens. It must merge nothing itself.
        queries: the number of positions of the prompt whose queries are fitted, of every query head.
        seed: of the sample.
        merge: the fit, whose options are those of `kvjax.parts.FittedEntries`.

    Raises:
        ValueError: for a value that is not accepted, and for a base that merges, that observes queries before RoPE, or
            whose keys are rotated to their places in the cache.
    """
    check_kind("base", base, Policy)
    check_kind("merge", merge, FittedEntries)
    if base.merge.effects.merges:
        raise ValueError(
            f"its base already merges entries, by {type(base.merge).__name__}; choose a base that merges nothing"
        )
    return replace(base, score=QuerySample(base.score, queries, seed), merge=merge)

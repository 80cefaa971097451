"""DynamicKV's budget: what a layer keeps follows from how many of the best scores of all layers are its own."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.heads import Heads
from kvjax.pallas_kernels import top_counts
from kvjax.protocols import SharedBudget, check_integer

from .budget import Fixed, Fraction
from .shared import check_layers_alike


@dataclass(frozen=True)
class DynamicShares(SharedBudget):
    """After every so many layers, those read so far are given of L * b entries in proportion to their best scores.

    Of the scores of n layers' H heads the b * H * n largest are counted, cnt_i being layer i's, and it is given
    Z_i = b * L * cnt_i / sum(cnt), b being the budget without what is protected. A layer keeps the least that it was
    ever given, and at most r_max * b, in each head (Algorithm 1). So L * b is the most that all layers keep together,
    and not what they always do, and a layer may keep nothing but what is protected. A prompt within the budget is kept.

    All layers' scores are known at once here, so all updates are made at once, with the same result. On a mesh the
    scores of all heads are gathered once a prompt.

    Attributes:
        budget: entries of the mean layer, protected ones included.
        interval: layers between updates; the last one is at the last layer.
        r_max: no layer keeps more than so many times b.
        code_rounding: Z rounded down twice, and the last layer given what is left over, as in the released code; or by
            largest remainders, so that they add up.
    """

    budget: Fixed | Fraction
    interval: int = 4
    r_max: float = 10.0
    code_rounding: bool = False

    def __post_init__(self) -> None:
        check_integer("interval", self.interval, least=1)
        if isinstance(self.r_max, str | bool) or not self.r_max >= 1:
            raise ValueError(f"r_max={self.r_max!r}: accepted is a number >= 1")
        check_layers_alike(self)

    def share(
        self, scores: Float[Array, "L B H M"], mean: Int[Array, "B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        L, B, _, M = scores.shape
        protected = jnp.sum(jnp.isposinf(scores), axis=-1)
        most_protected = jnp.max(protected, axis=(0, 2))
        distant = jnp.where(jnp.isposinf(scores), -jnp.inf, scores)
        there = jnp.sum(distant > -jnp.inf, axis=-1)
        longest = jnp.max(there, axis=(0, 2))
        room = jnp.clip(mean - most_protected, 0, M)
        floor = jnp.clip(least - most_protected, 0, room)  # what every layer is given first
        base = room - floor
        cap = jnp.minimum(jnp.floor(base * self.r_max + 1e-4).astype(jnp.int32), longest)
        whole = heads.whole_layer(jnp.moveaxis(distant, 0, 2))
        by_layer = jnp.moveaxis(whole, 2, 1).reshape(B, L, -1)
        kept = jnp.broadcast_to(cap[:, None], (B, L))
        for done in sorted({*range(self.interval, L, self.interval), L}):
            counts = top_counts(by_layer[:, :done], base * (whole.shape[1] * done))
            given = (_as_released if self.code_rounding else _exactly)(counts, base, cap, L, whole.shape[1])
            kept = kept.at[:, :done].min(given)
        kept = jnp.where((longest <= room)[:, None], M, floor[:, None] + kept)
        return protected + jnp.minimum(there, kept.T[..., None])


def _exactly(
    counts: Int[Array, "B n"], base: Int[Array, "B"], cap: Int[Array, "B"], layers: int, heads: int
) -> Int[Array, "B n"]:
    """base * layers entries in proportion to the counts, which add up to base * heads * n; the largest remainders up.

    Where there were fewer to count, all of them were, and each layer is given as many as it has or more.
    """
    whole, rest = jnp.divmod(counts * layers, heads * counts.shape[1])
    order = jnp.argsort(-rest, axis=-1, stable=True)
    left = jnp.sum(rest, axis=-1, keepdims=True) // (heads * counts.shape[1])
    return whole + (jnp.argsort(order, axis=-1) < left)


def _as_released(
    counts: Int[Array, "B n"], base: Int[Array, "B"], cap: Int[Array, "B"], layers: int, heads: int
) -> Int[Array, "B n"]:
    """The same with its released rounding: counts by layer and then shares of the cap are rounded down."""
    n = counts.shape[1]
    counts = counts // n
    if n == layers:
        counts = counts.at[:, -1].add(base * heads - jnp.sum(counts, axis=-1))
    shares = _scaled(cap[:, None], counts, jnp.sum(counts, axis=-1, keepdims=True))
    given = _scaled(shares, (base * layers)[:, None], jnp.sum(shares, axis=-1, keepdims=True))
    return given.at[:, -1].add(base * layers - jnp.sum(given, axis=-1))


def _scaled(a: Int[Array, "..."], b: Int[Array, "..."], c: Int[Array, "..."]) -> Int[Array, "..."]:
    """floor(a * b / c), 0 if c is, by long multiplication: the product may exceed 32 bits."""
    c = jnp.maximum(c, 1)
    whole, part = jnp.divmod(b, c)

    def add_bit(i: Array, sofar: tuple[Array, Array]) -> tuple[Array, Array]:
        quotient, rest = sofar
        rest = 2 * rest + jnp.where((a >> (30 - i)) & 1, part, 0)
        return 2 * quotient + rest // c, rest % c

    nothing = jnp.zeros(jnp.broadcast_shapes(a.shape, b.shape, c.shape), jnp.int32)
    quotient, _ = jax.lax.fori_loop(0, 31, add_bit, (nothing, nothing))
    return a * whole + quotient

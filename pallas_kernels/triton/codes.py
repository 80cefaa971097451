"""Attention of few query rows over codes: products of integers, with scales in logits and weights instead of entries.

Each group of channels that share a scale has a copy of the query rows, which is zero in the other groups. For a query
q, codes c and weights w,

    q . k = sum over groups of scale (q_group . c),    w v = (w scale of the channel's group) c

A product has at least 16 rows on a GPU, and few query rows leave most of them empty. The copies therefore cost nothing,
and no number of a key or value is rounded.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int8, Int32

from ..quantized import LARGEST, QuantizedArray
from .blocks import power_of_two
from .common import product

LEAST_ROWS = 16  # of a product
MOST_ROWS = 32  # copies included; with 64, dequantising takes fewer instructions
LEAST_CHANNELS = 32  # of a product of integers
TERMS = 3  # integers that make a number of a query
FINER = 2 * LARGEST[8]  # steps of a term that make one step of the term before it
SMALLEST = 1e-30  # the least magnitude that is told from zero


class Form(NamedTuple):
    """The form in which a tile holds codes: unit * code + zero."""

    unit: int
    zero: int


FORMS = {8: [Form(1, 0)], 4: [Form(1, 8), Form(16, 0)]}  # of the tiles that `code_tiles` gives


def code_rows(rows: int, k: Any, v: Any) -> int | None:
    """The height of a block of query rows that multiplies codes as they are; None if entries are dequantised."""
    if not (isinstance(k, QuantizedArray) and isinstance(v, QuantizedArray) and k.dtype == jnp.bfloat16):
        return None  # other dtypes keep more digits of a weight
    groups = groups_of(k)
    height = max(power_of_two(rows, 1), LEAST_ROWS // groups)
    least = LEAST_CHANNELS * len(FORMS[k.bits])
    if groups_of(v) != groups or height * groups > MOST_ROWS or min(k.shape[-1], v.shape[-1]) < least:
        return None
    return height


class IntegerRows(NamedTuple):
    """Copies of query rows as integers: q / unit = step (terms[0] + terms[1] / FINER + terms[2] / FINER^2).

    That is exact to 6e-8 of a row's largest magnitude in the group. The unit is that of a tile's codes.

    Attributes:
        terms: from -127 to 127, for each tile of channels that `code_tiles` gives.
        step: 1 / 127 of the largest magnitude.
        zero: the product of a row with a tile of zeros.
    """

    terms: list[list[Int8[Array, "groups*R C"]]]
    step: Float[Array, "groups*R 1"]
    zero: Float[Array, "groups*R 1"]

    @classmethod
    def of(cls, q: list[Float[Array, "R C"]], k: QuantizedArray) -> IntegerRows:
        """The query rows, given by tiles of channels, for products with keys k."""
        tiles = [
            jnp.where(own, x[None].astype(jnp.float32) / form.unit, 0).reshape(-1, x.shape[1])
            for x, own, form in zip(q, own_channels(q, groups_of(k)), FORMS[k.bits], strict=True)
        ]
        largest = reduce(jnp.maximum, [jnp.max(jnp.abs(x), axis=1) for x in tiles])
        step = jnp.maximum(largest, SMALLEST)[:, None] / LARGEST[8]
        rest = [x / step for x in tiles]
        terms: list[list[Array]] = []
        for _ in range(TERMS):
            term = [jnp.floor(x + 0.5) for x in rest]  # the nearest integers; Triton has no `round`
            rest = [FINER * (x - y) for x, y in zip(rest, term, strict=True)]
            terms.append([x.astype(jnp.int8) for x in term])
        zeros = [form.zero * jnp.sum(x, axis=1) for x, form in zip(tiles, FORMS[k.bits], strict=True)]
        return cls(terms, step, reduce(jnp.add, zeros)[:, None])

    def products(self, keys: QuantizedArray) -> Float[Array, "R K"]:
        """Returns q k^T for a tile of K keys."""
        codes, scales = code_tiles(keys), by_group(keys)

        def times(term: list[Array]) -> Float[Array, "groups*R K"]:
            products = [integer_product(x, y.T) for x, y in zip(term, codes, strict=True)]
            return reduce(jnp.add, products).astype(jnp.float32)

        total = reduce(lambda finer, products: finer * (1 / FINER) + products, map(times, reversed(self.terms)))
        total = total * self.step - self.zero
        return jnp.sum(total.reshape(len(scales), -1, total.shape[1]) * scales, axis=0)


def integer_product(x: Int8[Array, "rows C"], y: Int8[Array, "C K"]) -> Int32[Array, "rows K"]:
    return jax.lax.dot(x, y, preferred_element_type=jnp.int32)


def weighted_codes(weights: Float[Array, "R K"], values: QuantizedArray) -> list[Float[Array, "groups*R C"]]:
    """The weighted sums of a tile of values, for each tile of channels, in the units of the codes: see `context_of`.

    A copy of a row has the weights times the scales of its group, rounded to bfloat16.
    """
    scaled = (weights[None] * by_group(values)).reshape(-1, weights.shape[1]).astype(jnp.bfloat16)
    forms = zip(code_tiles(values), FORMS[values.bits], strict=True)
    return [product(scaled, codes.astype(jnp.bfloat16) - form.zero) for codes, form in forms]


def context_of(sums: list[Float[Array, "groups*R C"]], values: QuantizedArray) -> list[Float[Array, "R C"]]:
    """The weighted sum of the values, of which a copy of a row has the channels of its group."""
    groups = groups_of(values)
    return [
        jnp.sum(jnp.where(own, x.reshape(groups, -1, x.shape[1]), 0), axis=0) / form.unit
        for x, own, form in zip(sums, own_channels(sums, groups), FORMS[values.bits], strict=True)
    ]


def copies(x: Float[Array, " R"], groups: int) -> Float[Array, " groups*R"]:
    """The number of each row, for the copies of the rows."""
    return jnp.broadcast_to(x[None], (groups, len(x))).reshape(-1)


def code_tiles(x: QuantizedArray) -> list[Int8[Array, "K C"]]:
    """The codes of a tile, in the forms of `FORMS`; in 4 bits two tiles, of both halves of the channels.

    Compiled, one operation on bits handles four bytes. A shift would take each byte by itself.
    """
    return [x.codes] if x.bits == 8 else [(x.codes ^ 8) & 15, x.codes & -16]


def groups_of(x: QuantizedArray) -> int:
    """The number of groups of channels, each of which lies in one tile."""
    return max(x.scales.shape[-1], len(FORMS[x.bits]))


def by_group(x: QuantizedArray) -> Float[Array, "groups 1 K"]:
    """The scales of a tile."""
    scales = x.scales.astype(jnp.float32).T
    return jnp.broadcast_to(scales, (groups_of(x), scales.shape[1]))[:, None]


def own_channels(tiles: list[Array], groups: int) -> list[Bool[Array, "groups 1 C"]]:
    """Marks the channels of each tile that belong to each group."""
    C = tiles[0].shape[1]
    group = [jax.lax.div(i * C + jnp.arange(C), len(tiles) * C // groups) for i in range(len(tiles))]
    return [x[None, None] == jnp.arange(groups)[:, None, None] for x in group]

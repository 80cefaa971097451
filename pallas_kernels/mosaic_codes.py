"""Keys and values of a TPU's kernels, plain or quantised: how they lie, and products with tiles of them.

Codes are multiplied as they are, and scales are applied to what is smaller, logits and weights: so no number is rounded
to the dtype that it stands for. For that there are queries for each group of channels that share a scale, which are
zero in others. Two codes a byte are two tiles, of both halves of the channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import div
from jaxtyping import Array, Float, Int

from .mosaic import SUBLANES, product, round_up, row_positions
from .quantized import QuantizedArray
from .tiling import pad


class Rows(NamedTuple):
    """The query rows of each kv head as a kernel takes them.

    Attributes:
        queries: group-major, [n, R, D]. For codes [n, halves, groups * R, C]: of a half's C channels, R rows for each
            group, of which all others are zero.
        positions: of the R rows.
        height: R; for codes whole registers of rows, the last of which may see nothing.
        given: rows that there are.
    """

    queries: Float[Array, "n R D"] | Float[Array, "n halves groups*R C"]
    positions: Int[Array, "B R 1"]
    height: int
    given: int

    @classmethod
    def of(
        cls, q: Float[Array, "B Hq W D"], q_positions: Int[Array, "B W"], k: Array | QuantizedArray, heads: int
    ) -> Rows:
        """Raises NotImplementedError where a group of channels lies in both halves and beside others."""
        B, Hq, W, D = q.shape
        R = Hq // heads * W
        rows, positions = q.reshape(B * heads, R, D), row_positions(q_positions, Hq // heads)
        if not isinstance(k, QuantizedArray):
            return cls(rows, positions, R, R)
        halves, scales = 8 // k.bits, k.scales.shape[-1]
        if scales > 1 and scales % halves:
            raise NotImplementedError(f"{scales} scales for two halves of the channels; 1 and even numbers are taken")
        C, groups = D // halves, max(1, scales // halves)
        beyond = round_up(R, SUBLANES) - R
        rows, positions = pad(rows, beyond, axis=1), pad(positions, beyond, axis=1, value=-1)
        parts = jnp.moveaxis(rows.reshape(B * heads, R + beyond, halves, C), 2, 1)[:, :, None]
        own = jnp.arange(C) // (C // groups) == jnp.arange(groups)[:, None, None]
        queries = jnp.where(own, parts, 0).reshape(B * heads, halves, -1, C)
        return cls(queries, positions, R + beyond, R)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what a head's rows find: [R, D], or [halves, R, C]."""
        return (*self.queries.shape[1:-2], self.height, self.queries.shape[-1])

    def context(self, found: Float[Array, "n *halves R C"]) -> Float[Array, "n G*W D"]:
        if found.ndim == 4:
            found = jnp.moveaxis(found, 1, 2).reshape(len(found), self.height, -1)
        return found[:, : self.given]


def alike(k: Array | QuantizedArray, v: Array | QuantizedArray) -> None:
    """Raises NotImplementedError unless values are held as keys are."""
    held = [tuple(x.shape for x in jax.tree.leaves(x)) for x in (k, v)]
    if held[0] != held[1]:
        raise NotImplementedError("keys and values that are not quantised alike")


def nbytes_of(x: Array | QuantizedArray) -> int:
    """Of an entry."""
    return sum(leaf.shape[-1] * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))


def slots_last(x: Any, turned: bool) -> Any:
    """[B, H, S, D] as [B*H, S, D], or [B*H, D, S] if they are turned; scales always are."""
    if isinstance(x, QuantizedArray):
        return replace(x, codes=slots_last(x.codes, turned), scales=slots_last(x.scales, True))
    x = jnp.swapaxes(x, 2, 3) if turned else x
    return x.reshape(-1, *x.shape[2:])


def read(ref: Any) -> Array:
    """All of a block."""
    return ref[...]


def cleared(tile: Any, turned: bool, begin: Any, end: Any) -> Any:
    """A tile with zeros for entries that are not in begin .. end - 1, which need not be numbers."""
    if isinstance(tile, QuantizedArray):
        return replace(tile, scales=cleared(tile.scales.astype(jnp.float32), True, begin, end))
    index = jax.lax.broadcasted_iota(jnp.int32, tile.shape, int(turned))
    return jnp.where((index >= begin) & (index < end), tile, 0)


def logits_of(q: Any, keys: Any, turned: bool) -> Float[Array, "R K"]:
    """Of queries as `Rows` has them and a tile [K, D], or [D, K] if it is turned."""
    contract = 1, 0 if turned else 1
    if not isinstance(keys, QuantizedArray):
        return product(q, keys, contract)
    total = jnp.float32(0)
    for half, (codes, scales) in enumerate(halves_of(keys, q.dtype)):
        each = product(q[half], codes, contract)
        R = len(each) // len(scales)
        for group in range(len(scales)):
            total += each[group * R : (group + 1) * R] * scales[group : group + 1]
    return total


def weighed(values: Any, turned: bool, weights: Float[Array, "R K"]) -> Float[Array, "*halves R C"]:
    """The sum of a tile's values, which lies as keys do, with weights; of quantised ones, of each half."""
    if not isinstance(values, QuantizedArray):
        return product(weights.astype(values.dtype), values, (1, int(turned)))
    sums = []
    for codes, scales in halves_of(values, values.dtype):
        R, groups = len(weights), len(scales)
        scaled = jnp.concatenate([weights * scales[group : group + 1] for group in range(groups)])
        each = product(scaled.astype(codes.dtype), codes, (1, int(turned)))
        C = each.shape[1]
        own = div(jax.lax.broadcasted_iota(jnp.int32, (R, C), 1), C // groups)
        sums.append(sum(jnp.where(own == group, each[group * R : (group + 1) * R], 0.0) for group in range(groups)))
    return jnp.stack(sums)


def halves_of(tile: QuantizedArray, dtype: Any) -> list[tuple[Array, Float[Array, "groups K"]]]:
    """Codes as numbers of such a dtype, and their scales, of each half; all channels of 8-bit codes are one."""
    codes, scales = tile.codes.astype(jnp.int32), tile.scales.astype(jnp.float32)
    halves = [codes] if tile.bits == 8 else [(codes << 28) >> 28, codes >> 4]
    shared = [scales] * len(halves) if len(scales) == 1 else jnp.split(scales, len(halves))
    return [(x.astype(jnp.float32).astype(dtype), y) for x, y in zip(halves, shared, strict=True)]

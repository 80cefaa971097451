"""Keys and values of the TPU kernels, plain or quantised: their layout, and products with tiles of them.

The kernels multiply codes as they are. They apply the scales to logits and weights, which are smaller than keys and
values, so no dequantised number is rounded. This takes one copy of the queries for each group of channels that share a
scale; a copy is zero in the other groups. A tile of bytes with two codes each is two tiles, of both halves of the
channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import div
from jaxtyping import Array, Float, Int

from ..arrays import pad
from ..quantized import QuantizedArray
from .common import SUBLANES, product, round_up, row_positions, stored_transposed


class QueryRows(NamedTuple):
    """The query rows of each kv head in the layout of the kernels.

    Attributes:
        queries: group-major. For codes, each half of the channels (C of them) has R rows for each group of channels,
            which are zero in the other groups.
        positions: of the R rows; -1 for padding.
        height: R. For codes, the number of query rows is padded to full registers.
        given: the number of query rows without padding.
    """

    queries: Float[Array, "B*H R D"] | Float[Array, "B*H halves groups*R C"]
    positions: Int[Array, "B R 1"]
    height: int
    given: int

    @classmethod
    def of(
        cls, q: Float[Array, "B Hq W D"], q_positions: Int[Array, "B W"], k: Array | QuantizedArray, heads: int
    ) -> QueryRows:
        """Arranges the queries of `heads` kv heads for keys k.

        Raises:
            NotImplementedError: for 4-bit codes with an odd number of scales other than 1, because a group of channels
                then lies in both halves.
        """
        B, Hq, W, D = q.shape
        R = Hq // heads * W
        rows, positions = q.reshape(B * heads, R, D), row_positions(q_positions, Hq // heads)
        if not isinstance(k, QuantizedArray):
            return cls(rows, positions, R, R)
        halves, scales = 8 // k.bits, k.scales.shape[-1]
        if scales > 1 and scales % halves:
            raise NotImplementedError(f"{scales} scales for two halves of the channels: expected 1 or an even number")
        C, groups = D // halves, max(1, scales // halves)
        padding = round_up(R, SUBLANES) - R
        rows, positions = pad(rows, padding, axis=1), pad(positions, padding, axis=1, value=-1)
        parts = jnp.moveaxis(rows.reshape(B * heads, R + padding, halves, C), 2, 1)[:, :, None]
        own = jnp.arange(C) // (C // groups) == jnp.arange(groups)[:, None, None]
        queries = jnp.where(own, parts, 0).reshape(B * heads, halves, -1, C)
        return cls(queries, positions, R + padding, R)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the results of one kv head: [R, D], or [halves, R, C]."""
        return (*self.queries.shape[1:-2], self.height, self.queries.shape[-1])

    def unpad(self, result: Float[Array, "B*H *halves R C"]) -> Float[Array, "B*H G*W D"]:
        """Joins the halves of a result and drops the rows of padding."""
        if result.ndim == 4:
            result = jnp.moveaxis(result, 1, 2).reshape(len(result), self.height, -1)
        return result[:, : self.given]


def check_alike(k: Array | QuantizedArray, v: Array | QuantizedArray) -> None:
    """Raises NotImplementedError unless keys and values are stored in the same way."""
    shapes = [tuple(x.shape for x in jax.tree.leaves(x)) for x in (k, v)]
    if shapes[0] != shapes[1]:
        raise NotImplementedError(f"keys stored as {shapes[0]} and values as {shapes[1]}: expected the same storage")


def entry_nbytes(x: Array | QuantizedArray) -> int:
    """The number of bytes per entry."""
    return sum(leaf.shape[-1] * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))


def transposed_storage(x: Array | QuantizedArray) -> bool:
    """Returns whether a TPU stores keys and values, or their codes, with entries along vector lanes."""
    return stored_transposed((x.codes if isinstance(x, QuantizedArray) else x).shape[-1])


def merge_heads(x: Any, transposed: bool) -> Any:
    """Reshapes [B, H, S, D] to [B*H, S, D], or to [B*H, D, S] if transposed. Scales are always transposed."""
    if isinstance(x, QuantizedArray):
        return replace(x, codes=merge_heads(x.codes, transposed), scales=merge_heads(x.scales, True))
    x = jnp.swapaxes(x, 2, 3) if transposed else x
    return x.reshape(-1, *x.shape[2:])


def read(ref: Any) -> Array:
    """Loads a block."""
    return ref[...]


def clear_outside(tile: Any, transposed: bool, begin: Any, end: Any) -> Any:
    """Zeroes the entries of a tile outside begin .. end - 1. They may be NaN."""
    if isinstance(tile, QuantizedArray):
        return replace(tile, scales=clear_outside(tile.scales.astype(jnp.float32), True, begin, end))
    index = jax.lax.broadcasted_iota(jnp.int32, tile.shape, int(transposed))
    return jnp.where((index >= begin) & (index < end), tile, 0)


def tile_logits(q: Any, keys: Any, transposed: bool) -> Float[Array, "R K"]:
    """The products of queries, as in `QueryRows`, and a tile of keys [K, D], or [D, K] if transposed."""
    contract = 1, 0 if transposed else 1
    if not isinstance(keys, QuantizedArray):
        return product(q, keys, contract)
    total = jnp.float32(0)
    for half, (codes, scales) in enumerate(halves_of(keys, q.dtype)):
        each = product(q[half], codes, contract)
        R = len(each) // len(scales)
        for group in range(len(scales)):
            total += each[group * R : (group + 1) * R] * scales[group : group + 1]
    return total


def weighted_values(values: Any, transposed: bool, weights: Float[Array, "R K"]) -> Float[Array, "*halves R C"]:
    """The weighted sum of a tile's values, in the layout of the keys; one sum per half of the channels for codes."""
    if not isinstance(values, QuantizedArray):
        return product(weights.astype(values.dtype), values, (1, int(transposed)))
    sums = []
    for codes, scales in halves_of(values, values.dtype):
        R, groups = len(weights), len(scales)
        scaled = jnp.concatenate([weights * scales[group : group + 1] for group in range(groups)])
        each = product(scaled.astype(codes.dtype), codes, (1, int(transposed)))
        C = each.shape[1]
        own = div(jax.lax.broadcasted_iota(jnp.int32, (R, C), 1), C // groups)
        sums.append(sum(jnp.where(own == group, each[group * R : (group + 1) * R], 0.0) for group in range(groups)))
    return jnp.stack(sums)


def halves_of(tile: QuantizedArray, dtype: Any) -> list[tuple[Array, Float[Array, "groups K"]]]:
    """The codes, as numbers of `dtype`, and the scales of each half. 8-bit codes have one half with all channels."""
    codes, scales = tile.codes.astype(jnp.int32), tile.scales.astype(jnp.float32)
    halves = [codes] if tile.bits == 8 else [(codes << 28) >> 28, codes >> 4]
    half_scales = [scales] * len(halves) if len(scales) == 1 else jnp.split(scales, len(halves))
    return [(x.astype(jnp.float32).astype(dtype), y) for x, y in zip(halves, half_scales, strict=True)]

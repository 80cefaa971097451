"""Joins softmaxes over different slots into one, by their log-sum-exps, as a Pallas kernel for GPUs (Triton)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from ..softmax import finite_or_zero
from .blocks import power_of_two


def join(
    out: Float[Array, "B H splits R D"] | None,
    lse: Float[Array, "B H splits R"],
    dtype: Any,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B H R D"] | None, Float[Array, "B H R"]]:
    """Joins the results of programs that each attended to a part of the slots.

    Args:
        out: the context of each part; None if no values were given.
        lse: the float32 log-sum-exp of each part.
        dtype: the dtype of the joined context.
    """
    B, H, splits, R = lse.shape
    if splits == 1:
        return None if out is None else jnp.squeeze(out, 2).astype(dtype), jnp.squeeze(lse, 2)
    if out is None:
        return None, jax.nn.logsumexp(lse, axis=2)
    D = out.shape[-1]
    padded, Dp = power_of_two(splits), power_of_two(D)
    row = pl.BlockSpec((None, None, None), lambda r, h, b: (b, h, r))
    return pl.pallas_call(
        partial(join_kernel, sizes=(splits, D)),
        grid=(R, H, B),
        in_specs=[
            pl.BlockSpec((None, None, padded, None, Dp), lambda r, h, b: (b, h, 0, r, 0)),
            pl.BlockSpec((None, None, padded, None), lambda r, h, b: (b, h, 0, r)),
        ],
        out_specs=[pl.BlockSpec((None, None, None, Dp), lambda r, h, b: (b, h, r, 0)), row],
        out_shape=[jax.ShapeDtypeStruct((B, H, R, D), dtype), jax.ShapeDtypeStruct((B, H, R), jnp.float32)],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
    )(out, lse)


def join_kernel(out_ref: Any, lse_ref: Any, joined_ref: Any, joined_lse_ref: Any, *, sizes: Sequence[int]) -> None:
    splits, D = sizes
    padded, Dp = out_ref.shape
    part, channel = jnp.arange(padded) < splits, jnp.arange(Dp) < D
    lse = plgpu.load(lse_ref, mask=part, other=-jnp.inf)
    out = plgpu.load(out_ref, mask=part[:, None] & channel[None], other=0)
    peak = jnp.max(lse)
    shares = jnp.exp(lse - finite_or_zero(peak))
    total = jnp.sum(shares)
    total = jnp.where(total == 0, 1.0, total)
    joined = jnp.sum(out * (shares / total)[:, None], axis=0)
    plgpu.store(joined_ref, joined.astype(joined_ref.dtype), mask=channel)
    joined_lse_ref[()] = peak + jnp.log(total)

"""Measures the statistics of a model's queries on texts, in memory that does not grow with the texts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.attend import rotated
from kvjax.attend.causal import causal
from kvjax.checks import check_one_kind
from kvjax.models import AttentionLayer, Decoder
from kvjax.runtime.modes import own_modes


class Moments(NamedTuple):
    """Float32 means over the queries of a batch, of all layers.

    Attributes:
        mean: of the queries before RoPE.
        scatter: of the outer products of their differences from the mean.
        norms: of the norm of each pair of channels that RoPE rotates; 0 behind the last pair.
        turned_mean: of the queries after RoPE.
        turned_scatter: of the outer products of their differences from the mean.
    """

    mean: Float[Array, "L Hq D"]
    scatter: Float[Array, "L Hq D D"]
    norms: Float[Array, "L Hq D/2"]
    turned_mean: Float[Array, "L Hq D"]
    turned_scatter: Float[Array, "L Hq D D"]

    def totals(self, number: int) -> list[Float[np.ndarray, "L Hq *rest"]]:
        """Float64 sums over that number of queries, with outer products of the queries themselves."""
        mean, scatter, norms, turned_mean, turned_scatter = (np.asarray(x, np.float64) for x in self)
        square, turned_square = scatter + _outer(mean), turned_scatter + _outer(turned_mean)
        return [number * x for x in (mean, square, norms, turned_mean, turned_square)]


@own_modes()
def measured(params: Decoder, batches: Iterable[Int[np.ndarray, "B N"]], sinks: int) -> dict[str, np.ndarray]:
    """All `STATISTICS` of the queries of texts.

    Sums are float64. The covariance has the denominator n - 1. The filter of a query head is the eigenvector of the
    largest eigenvalue of the sum of q q' after RoPE, which is the principal right-singular vector v of its queries,
    with the sign for which the mean of v . q is positive. The filter of a kv head is minus the mean over its group.

    Args:
        params: the decoder.
        batches: token ids of texts without padding, all longer than `sinks`.
        sinks: the number of first tokens of each text whose queries do not count.

    Raises:
        ValueError: there are fewer than two queries, or layers have kv heads of several kinds.
        FloatingPointError: queries are not finite.
    """
    check_one_kind("statistics", params.config)
    number, total = 0, None
    for i, tokens in enumerate(batches):
        count = tokens.shape[0] * (tokens.shape[1] - sinks)
        sums = moments(params, jnp.asarray(tokens), sinks=sinks).totals(count)
        if count and not all(np.isfinite(x).all() for x in sums):
            raise FloatingPointError(
                f"queries of batch {i} are NaN or infinite, or their squares are, with weights in "
                f"{params.embed.dtype}: expected finite ones, which another dtype may give"
            )
        number, total = number + count, sums if total is None else [a + b for a, b in zip(total, sums, strict=True)]
    if total is None or number < 2:
        raise ValueError(f"{number} queries: expected two or more")
    mean, square, norms, turned_mean, turned_square = (x / number for x in total)
    covariance = (square - _outer(mean)) * (number / (number - 1))
    principal = np.linalg.eigh(turned_square)[1][..., -1]
    principal *= np.where(np.sum(principal * turned_mean, axis=-1, keepdims=True) < 0, -1, 1)
    config = params.config
    groups = principal.reshape(config.num_layers, config.num_kv_heads, -1, config.head_dim)
    found = {"q_filters": -groups.mean(axis=2), "query_mean": mean, "query_cov": covariance, "query_norms": norms}
    return {name: statistic.astype(np.float32) for name, statistic in found.items()}


@partial(jax.jit, static_argnames="sinks")
def moments(params: Decoder, tokens: Int[Array, "B N"], *, sinks: int) -> Moments:
    """The means over a batch of texts without padding."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    attend, seen = causal(positions), []

    def look(layer: AttentionLayer, q: Float[Array, "B Hq N D"], *others: Any) -> tuple[Array, Any]:
        rope = layer.rope.row_frequencies(q.shape[-1], jnp.max(positions, axis=1) + 1)
        grown = layer.rope.grown(q, positions)
        turned, own = rotated(layer, grown, positions[:, None], rope), grown[:, :, sinks:]
        seen.append((*_means(own), _pair_norms(layer, own), *_means(turned[:, :, sinks:])))
        return attend(layer, q, *others)

    params(tokens, look)
    return Moments(*(jnp.stack(layers) for layers in zip(*seen, strict=True)))


def _means(q: Float[Array, "B Hq N D"]) -> tuple[Float[Array, "Hq D"], Float[Array, "Hq D D"]]:
    """The mean of queries, and of the outer products of their differences from it."""
    wide = q.astype(jnp.float32)
    mean = jnp.mean(wide, axis=(0, 2))
    apart = wide - mean[:, None]
    products = jnp.einsum("BHND,BHNE->HDE", apart, apart, precision="highest")
    return mean, products / (q.shape[0] * q.shape[2])


def _pair_norms(layer: AttentionLayer, q: Float[Array, "B Hq N D"]) -> Float[Array, "Hq D/2"]:
    half = layer.rope.channels(q.shape[-1]) // 2
    first, second = (q[..., at : at + half].astype(jnp.float32) for at in (0, half))
    norms = jnp.mean(jnp.hypot(first, second), axis=(0, 2))
    return jnp.pad(norms, ((0, 0), (0, q.shape[-1] // 2 - half)))


def _outer(x: Float[np.ndarray, "*rest D"]) -> Float[np.ndarray, "*rest D D"]:
    return x[..., :, None] * x[..., None, :]

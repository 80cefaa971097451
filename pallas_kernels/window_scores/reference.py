"""The definition of `window_scores`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import Fold
from ..definition import logits_of, weights_of
from .reduction import DEFAULT_REDUCTION, Reduction

FOLDS: dict[Fold, Callable[..., Array]] = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max}


def window_scores(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H M D"],
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    lse: Float[Array, "B Hq W"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H M"] | None = None,
    causal: bool = True,
    reduction: Reduction = DEFAULT_REDUCTION,
) -> Float[Array, "B H *G M"]:
    """Reduces the softmax weights of W queries on each key to one float32 score per key.

    The weight of query r on key c is exp(scale q_r . k_c + bias_c - lse_r) if r sees c, else 0.

    Args:
        scale: of the logits, q k^T.
        lse: float32, the log-sum-exp with which each query attended. If None, it is computed over the keys given here.
        window: the model's sliding window.
        softcap: of the scaled logits, before the bias; see `capped`.
        bias: float32, added to the scaled logits of each key.
        causal: False if no key is newer than any query. Positions then need no comparison, and a backend may leave it
            out.
        reduction: of the [G, W] weights of a key to one score. A key that no query sees scores 0.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias}
    logits, seen = logits_of(q, k, q_positions, k_positions, **options)
    weights, _ = weights_of(logits, lse)
    viewers = jnp.maximum(jnp.sum(seen, axis=2), 1)[:, :, None]  # of each key

    def over_rows(x: Float[Array, "B H G W M"]) -> Float[Array, "B H G M"]:
        return jnp.sum(x, axis=3) / viewers if reduction.rows == "mean" else FOLDS[reduction.rows](x, axis=3)

    if reduction.group == "none":
        return over_rows(weights)
    over_group = FOLDS[reduction.group]
    if reduction.first == "rows":
        return over_group(over_rows(weights), axis=2)
    return over_rows(over_group(weights, axis=2, keepdims=True))[:, :, 0]

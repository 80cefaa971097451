"""The definition of `prompt_attention`."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from ..definition import context_of, logits_of, weights_of


def prompt_attention(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H M D"],
    v: Float[Array, "B H M D"],
    q_positions: Int[Array, "B N"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H M"] | None = None,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]:
    """Causal attention, by position, of N new tokens over M = S + N entries.

    The last N entries are the new tokens themselves, in the order of the queries. The S entries before them are cached
    slots in any order.

    Args:
        q_positions: consecutive for the tokens of a row; -1 for padding, which is on the left.
        scale: of the logits, q k^T.
        window: the model's sliding window.
        softcap: of the scaled logits, before the bias; see `capped`.
        bias: float32, added to the scaled logits of each entry.

    Returns:
        The context in q's dtype, and the float32 log-sum-exp of each query's scaled logits, -inf if it sees nothing.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias}
    logits, _ = logits_of(q, k, q_positions, k_positions, **options)
    weights, lse = weights_of(logits)
    return context_of(weights, v).astype(q.dtype), lse

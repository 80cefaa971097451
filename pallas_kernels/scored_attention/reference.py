"""The definition of `scored_attention`."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Float, Int

from ..prompt_attention.reference import prompt_attention
from ..window_scores.reduction import Reduction
from ..window_scores.reference import window_scores


def scored_attention(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H M D"],
    v: Float[Array, "B H M D"],
    q_positions: Int[Array, "B N"],
    k_positions: Int[Array, "B H M"],
    *,
    reductions: tuple[Reduction, ...],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H M"] | None = None,
    own: bool = True,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"], tuple[Float[Array, "B H *G M"], ...]]:
    """Attention of N new tokens over M = S + N entries, and what each entry received.

    Args:
        reductions: of the weights of all N queries. "mean" over queries is not served.
        own: whether what the last N keys received is asked for, too. If not, and there are others, their scores are 0.

    Returns:
        What `prompt_attention` returns, bit by bit, and the float32 scores that `window_scores` computes from it in a
        second pass for each reduction, [B, H, M], or [B, H, G, M] with group="none".
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "bias": bias}
    positions = q_positions, k_positions
    context, lse = prompt_attention(q, k, v, *positions, **options)
    scores = tuple(window_scores(q, k, *positions, lse=lse, reduction=kind, **options) for kind in reductions)
    slots = k.shape[2] - q.shape[2]
    if slots and not own:
        scores = tuple(x.at[..., slots:].set(0) for x in scores)
    return context, lse, scores

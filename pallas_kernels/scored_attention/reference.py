"""Prompt attention with what each key received, in plain XLA; see `blocked`."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from ..window_scores.reference import Reduction
from ..xla.blocked import blocked


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
    """What `prompt_attention` returns, bit by bit, and what `window_scores` computes from it in a second pass.

    Args:
        reductions: of the weights of all N queries. "mean" over queries is not served.
        own: whether what the last N keys received is asked for, too. If not, and there are others, their scores are 0.

    Returns:
        Context and log-sum-exp, and the float32 scores of each reduction, [B, H, M], or [B, H, G, M] with group="none".
    """
    return blocked(
        q,
        k,
        v,
        q_positions,
        k_positions,
        scale=scale,
        window=window,
        softcap=softcap,
        bias=bias,
        reductions=reductions,
        own=own,
    )

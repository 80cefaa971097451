"""The attention that the references define, in float32 with every weight in memory. No backend uses it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .softmax import capped
from .visibility import visible


def logits_of(
    q: Float[Array, "B Hq W D"],
    k: Float[Array, "B H M D"],
    q_positions: Int[Array, "B W"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Float[Array, "B H M"] | None = None,
) -> tuple[Float[Array, "B H G W M"], Bool[Array, "B H W M"]]:
    """Returns capped(scale q k^T) + bias, -inf where the query does not see the key; and what each query sees."""
    (B, Hq, W, D), H = q.shape, k.shape[1]
    rows = q.astype(jnp.float32).reshape(B, H, Hq // H, W, D)
    products = jnp.einsum("BHGWD,BHMD->BHGWM", rows, k.astype(jnp.float32), precision="highest")
    logits = capped(scale * products, softcap)
    if bias is not None:
        logits += bias[:, :, None, None]
    seen = visible(q_positions, k_positions, window)
    return jnp.where(seen[:, :, None], logits, -jnp.inf), seen


def weights_of(
    logits: Float[Array, "B H G W M"], lse: Float[Array, "B Hq W"] | None = None
) -> tuple[Float[Array, "B H G W M"], Float[Array, "B Hq W"]]:
    """Returns exp(logit - lse), and the log-sum-exp: that of the logits unless it is given. -inf gives no weight."""
    B, H, G, W, _ = logits.shape
    if lse is None:
        lse = jax.nn.logsumexp(logits, axis=-1).reshape(B, H * G, W)
    shift = jnp.where(lse == -jnp.inf, jnp.inf, lse).reshape(B, H, G, W, 1)
    return jnp.exp(logits - shift), lse


def context_of(weights: Float[Array, "B H G W M"], v: Float[Array, "B H M D"]) -> Float[Array, "B Hq W D"]:
    """Returns the weighted sum of the values."""
    B, H, G, W, _ = weights.shape
    context = jnp.einsum("BHGWM,BHMD->BHGWD", weights, v.astype(jnp.float32), precision="highest")
    return context.reshape(B, H * G, W, -1)

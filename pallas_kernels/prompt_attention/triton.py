"""Attention of many new tokens on GPUs: by cuDNN where it can say which keys a query sees, else by Triton.

cuDNN knows causal masks, windows, and rows that end early. That is the reading of a prompt into an empty cache, once
padding is moved to the right. Cached slots in any order, a bias, and float32 are Triton's.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..tiling import pad
from ..triton_attention import attend, blocks_for, check
from ..visibility import ends, sees


def prompt_attention(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H M D"],
    v: Float[Array, "B H M D"],
    q_positions: Int[Array, "B N"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
    window: int | None = None,
    bias: Float[Array, "B H M"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]:
    """As the reference.

    Raises:
        NotImplementedError: for mixed or other dtypes than float32, bfloat16 and float16, and for more than 256
            channels a head.
    """
    check(q, k, v)
    B, Hq, N, D = q.shape
    H, M = k.shape[1:3]
    if not interpret and M == N and bias is None and q.dtype != jnp.float32:
        try:
            return by_cudnn(q, k, v, q_positions, scale=scale, window=window)
        except (ImportError, NotImplementedError, RuntimeError):  # not installed, or not for such heads or GPUs
            pass
    rows = q.reshape(B, H, -1, D)
    blocks = blocks_for(rows.shape[2], k)
    t = jnp.tile(q_positions, (1, Hq // H))
    t = pad(t, -t.shape[1] % blocks.rows, axis=1, value=-1)
    seen = sees(t, k_positions, rows=blocks.rows, keys=blocks.slots, window=window)
    options: dict[str, Any] = {"scale": scale, "window": window, "bias": bias, "blocks": blocks, "interpret": interpret}
    span = ends(jnp.swapaxes(seen, 2, 3))
    found = attend(rows, k, v, q_positions, k_positions, jnp.full((B, H), M), span=span, **options)
    assert found.out is not None
    return found.out.reshape(q.shape), found.lse.reshape(B, Hq, N)


def by_cudnn(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H N D"],
    v: Float[Array, "B H N D"],
    positions: Int[Array, "B N"],
    *,
    scale: float,
    window: int | None,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]:
    """Causal attention of tokens over themselves, of which each row's last ones follow each other, after padding.

    `jax.nn.dot_product_attention` would round the log-sum-exp to q's dtype; what it calls does not.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    lengths = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)
    place = jnp.arange(q.shape[2])

    def turned(x: Array, by: Int[Array, "B"]) -> Array:
        """Each row moved on by so many tokens, around the end."""
        index = (place - by[:, None]) % x.shape[2]
        return jnp.take_along_axis(x, index.reshape(index.shape[0], 1, -1, *(1,) * (x.ndim - 3)), axis=2)

    q, k, v = (turned(x, lengths) for x in (q, k, v))
    found = cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        scale=scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        qkv_layout="BNTH",
        sliding_window_length=window,
        return_residual=True,
    )
    out, lse = (turned(x, -lengths) for x in found)
    there = (positions >= 0)[:, None]
    return jnp.where(there[..., None], out, 0), jnp.where(there, lse, -jnp.inf)

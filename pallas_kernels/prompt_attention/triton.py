"""Prompt attention on GPUs: cuDNN where it can express which keys a query sees, else the Triton attention kernel.

cuDNN knows causal masks, windows, and rows of different lengths that start at the left. That serves a prompt without
cached entries (M = N), once padding is moved to the right. Triton serves cached entries, a bias, and float32.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import pad
from ..triton import check
from ..triton_attention import attend, attend_blocks
from ..visibility import span, visible_tiles


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
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32, bfloat16 or float16; for D > 256; for a GPU
            that is not NVIDIA's or older than the A100.
    """
    check(q, k, v)
    B, Hq, N, D = q.shape
    H, M = k.shape[1:3]
    if not interpret and M == N and bias is None and q.dtype != jnp.float32:
        try:
            return by_cudnn(q, k, v, q_positions, scale=scale, window=window)
        except (ImportError, NotImplementedError, RuntimeError):  # not installed, or not for these heads or this GPU
            pass
    rows = q.reshape(B, H, -1, D)
    blocks = attend_blocks(rows.shape[2], k)
    t = jnp.tile(q_positions, (1, Hq // H))
    t = pad(t, -t.shape[1] % blocks.rows, axis=1, value=-1)
    seen = visible_tiles(t, k_positions, rows=blocks.rows, keys=blocks.slots, window=window)
    options: dict[str, Any] = {"scale": scale, "window": window, "bias": bias, "blocks": blocks, "interpret": interpret}
    spans = span(jnp.swapaxes(seen, 2, 3))
    results = attend(rows, k, v, q_positions, k_positions, jnp.full((B, H), M), spans=spans, **options)
    assert results.out is not None
    return results.out.reshape(q.shape), results.lse.reshape(B, Hq, N)


def by_cudnn(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H N D"],
    v: Float[Array, "B H N D"],
    positions: Int[Array, "B N"],
    *,
    scale: float,
    window: int | None,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]:
    """Causal attention of tokens over themselves, by cuDNN. The tokens of a row are consecutive and end it.

    This calls the function below `jax.nn.dot_product_attention`, which would round the log-sum-exp to q's dtype.

    Args:
        positions: -1 for padding, which is on the left.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    lengths = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)
    place = jnp.arange(q.shape[2])

    def rolled(x: Array, by: Int[Array, "B"]) -> Array:
        """Rolls each row by a number of tokens of its own."""
        index = (place - by[:, None]) % x.shape[2]
        return jnp.take_along_axis(x, index.reshape(index.shape[0], 1, -1, *(1,) * (x.ndim - 3)), axis=2)

    q, k, v = (rolled(x, lengths) for x in (q, k, v))
    results = cudnn.dot_product_attention(
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
    out, lse = (rolled(x, -lengths) for x in results)
    exists = (positions >= 0)[:, None]
    return jnp.where(exists[..., None], out, 0), jnp.where(exists, lse, -jnp.inf)

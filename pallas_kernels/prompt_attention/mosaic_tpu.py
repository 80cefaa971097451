"""Prompt attention on TPUs: splash attention, which is JAX's own kernel, from new tokens to themselves.

Splash attention masks by index, and padding by segment ids. Cached slots, which lie in any order, a bias, and longer
prompts are served by `mosaic_by_position`.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jaxtyping import Array, Float, Int

from ..arrays import pad
from ..mosaic_tpu.common import LANES, check, round_up
from ..softmax import Attention
from .mosaic_by_position import by_position
from .parts import in_parts, separable

MOST_BLOCKS = 256  # of queries, and of keys; scalar memory holds the table of tiles to visit, of 256 x 256
LSE_BYTES = 64 << 20  # splash attention writes each log-sum-exp LANES times, so it gets a few heads at a time


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
    interpret: bool = False,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]:
    """Computes what the reference defines.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32 or bfloat16.
    """
    check(q, k, v)
    cached = partial(by_position, scale=scale, window=window, softcap=softcap, interpret=interpret)
    if not separable(q, k, bias) or q.shape[2] > MOST_BLOCKS * splash_block(q):
        return cached(q, k, v, q_positions, k_positions, bias=bias)
    own = partial(by_splash, scale=scale, window=window, softcap=softcap, interpret=interpret)
    return in_parts(own, cached, q, k, v, q_positions, k_positions)


def splash_block(q: Float[Array, "B Hq N D"]) -> int:
    """Queries per block, and keys per block.

    A step of the grid takes 0.35 µs to start, whether its tile is visible or not. Tiles on the diagonal are computed in
    full. Above 1,024 tokens the time of the steps is longer: 1,024 queries and keys make a quarter as many.
    """
    N, channel_bytes = q.shape[2], q.shape[3] * q.dtype.itemsize
    return 1024 if N > 1024 and channel_bytes <= 512 else min(512, round_up(N, LANES))


def by_splash(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H N D"],
    v: Float[Array, "B H N D"],
    positions: Int[Array, "B N"],
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    interpret: bool = False,
) -> Attention:
    """Causal attention of tokens over themselves. The tokens of a row are consecutive and end it.

    Args:
        positions: -1 for padding, which is on the left.
    """
    B, Hq, N, D = q.shape
    H = k.shape[1]
    G = Hq // H
    block = splash_block(q)
    padding = -N % block
    kernel = _kernel(N + padding, G, block, window, softcap, interpret)

    def one_head(arrays: tuple[Array, ...]) -> tuple[Array, Array]:
        """Attention of the query heads of one kv head of one batch row."""
        rows, keys, values, exists = arrays
        out, (lse,) = kernel(rows, keys, values, splash.SegmentIds(exists, exists))
        return out, lse

    exists = pad((positions >= 0).astype(jnp.int32), padding, axis=1)
    rows = pad(q * scale, padding, axis=2).reshape(B * H, G, N + padding, D)
    keys, values = (pad(x, padding, axis=2).reshape(B * H, N + padding, D) for x in (k, v))
    heads = (rows, keys, values, jnp.repeat(exists, H, axis=0))
    most = LSE_BYTES // (G * (N + padding) * LANES * 4)
    at_once = next(n for n in range(B * H, 0, -1) if B * H % n == 0 and (n == 1 or n <= most))
    out, lse = jax.lax.map(one_head, heads, batch_size=at_once)
    out, lse = out.reshape(B, Hq, -1, D)[:, :, :N], lse.reshape(B, Hq, -1)[:, :, :N]
    seen = (positions >= 0)[:, None]
    return jnp.where(seen[..., None], out, 0), jnp.where(seen, lse, -jnp.inf)


@cache
def _block(value: bool, rows: int, columns: int) -> np.ndarray:
    return np.full((rows, columns), value)


class Band(masks.LocalMask):
    """A causal mask with an optional sliding window. Blocks with a single value are made without comparisons."""

    def __init__(self, length: int, window: int | None) -> None:
        super().__init__((length, length), (None if window is None else window - 1, 0), 0)

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (range(*part.indices(self.shape[0])) for part in index)
        nearest, farthest = rows[0] - columns[-1], rows[-1] - columns[0]
        left = self.window_size[0]
        if nearest >= 0 and (left is None or farthest <= left):
            return _block(True, len(rows), len(columns))
        if farthest < 0 or (left is not None and nearest > left):
            return _block(False, len(rows), len(columns))
        return super().__getitem__(index)


@cache
def _kernel(length: int, group: int, block: int, window: int | None, softcap: float | None, interpret: bool) -> Any:
    """Makes splash attention for one shape. Its tables of tiles take long for long prompts; all layers use the same."""
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mqa_single_device(
            masks.MultiHeadMask([Band(length, window)] * group),
            block_sizes=splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block),
            save_residuals=True,
            attn_logits_soft_cap=softcap,
            interpret=interpret,
        )

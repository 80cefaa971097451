"""Prompt attention on GPUs (Pallas, Triton) over entries in any order: positions decide what each query sees."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..arrays import pad
from ..triton.attention import attend, attend_blocks
from ..triton.common import check
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
    softcap: float | None = None,
    bias: Float[Array, "B H M"] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]:
    """Computes what `reference.prompt_attention` defines. The queries' own entries may lie anywhere among the M.

    Raises:
        NotImplementedError: for dtypes that differ or are not float32, bfloat16 or float16; for D > 256; for a GPU
            that is not NVIDIA's or older than the A100.
    """
    check(q, k, v)
    B, Hq, N, D = q.shape
    H, M = k.shape[1:3]
    rows = q.reshape(B, H, -1, D)
    blocks = attend_blocks(rows.shape[2], k)
    t = jnp.tile(q_positions, (1, Hq // H))
    t = pad(t, -t.shape[1] % blocks.rows, axis=1, value=-1)
    seen = visible_tiles(t, k_positions, rows=blocks.rows, keys=blocks.slots, window=window)
    over = partial(attend, scale=scale, window=window, softcap=softcap, bias=bias, interpret=interpret)
    spans = span(jnp.swapaxes(seen, 2, 3))
    results = over(rows, k, v, q_positions, k_positions, jnp.full((B, H), M), spans=spans, blocks=blocks)
    assert results.out is not None
    return results.out.reshape(q.shape), results.lse.reshape(B, Hq, N)

"""Prompt attention on NVIDIA GPUs by cuDNN: from new tokens to themselves, and to the cached slots before them.

cuDNN knows causal masks, windows, and rows of different lengths that start at the left. Triton serves cached slots in
any other order. cuDNN is called below `jax.nn.dot_product_attention`, which would round the log-sum-exp to q's dtype.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..dispatch import DeclinedError
from ..softmax import Attention
from .parts import in_parts, separable

ROLLED_BYTES = 256 << 20  # queries of padded rows that are moved at a time
PROBE_TOKENS = 256


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
) -> Attention:
    """Computes what the reference defines.

    Raises:
        DeclinedError: for a bias, a soft cap, a few new tokens over cached slots, and float32, which Triton serves; and
            if there is no GPU here to try cuDNN on.
        NotImplementedError: if cuDNN is missing or cannot compile prompts of such heads for the GPU that is here.
    """
    kinds = {jnp.dtype(x.dtype).name for x in (q, k, v)}
    if softcap is not None or not separable(q, k, bias) or kinds not in ({"bfloat16"}, {"float16"}):
        raise DeclinedError
    check_compiles(q.shape[1] // k.shape[1], q.shape[3], kinds.pop(), window)
    own = partial(by_cudnn, scale=scale, window=window)

    def cached(*arrays: Array) -> Attention:
        from . import triton  # prompts without cached slots do not need it

        def in_any_order() -> Attention:
            return triton.prompt_attention(*arrays, scale=scale, window=window, interpret=interpret)

        if window is not None:
            return in_any_order()
        *_, q_positions, k_positions = arrays
        return jax.lax.cond(in_front(q_positions, k_positions), partial(over_slots, *arrays, scale=scale), in_any_order)

    return in_parts(own, cached, q, k, v, q_positions, k_positions)


def check_compiles(group: int, channels: int, dtype: str, window: int | None) -> None:
    """Raises NotImplementedError if `failure` has a reason, and DeclinedError if there is no GPU to try cuDNN on."""
    if jax.local_devices()[0].platform != "gpu":
        raise DeclinedError
    reason = failure(group, channels, dtype, window)
    if reason is not None:
        raise NotImplementedError(reason)


@cache
def failure(group: int, channels: int, dtype: str, window: int | None) -> str | None:
    """Why a small prompt does not compile by cuDNN for the GPU that is here. None if it does. It is tried once.

    XLA calls cuDNN when it compiles a program, after the choice of kernels has been traced.
    """
    tokens = (PROBE_TOKENS, channels)
    q, k = (jax.ShapeDtypeStruct((2, heads, *tokens), dtype) for heads in (2 * group, 2))
    q_positions, k_positions = (jax.ShapeDtypeStruct((2, *heads, PROBE_TOKENS), jnp.int32) for heads in ((), (2,)))

    def compile() -> None:
        jax.jit(partial(by_cudnn, scale=1.0, window=window)).lower(q, k, k, q_positions).compile()
        if window is None:
            jax.jit(partial(over_slots, scale=1.0)).lower(q, k, k, q_positions, k_positions).compile()

    try:
        with ThreadPoolExecutor(1) as thread:  # which knows nothing of the trace or mesh that surrounds this call
            thread.submit(compile).result()
    except Exception as error:  # whatever it is, Triton serves the prompt
        return f"cuDNN with heads of {channels} channels: {type(error).__name__}: {error}".partition("\n")[0]
    return None


def by_cudnn(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H N D"],
    v: Float[Array, "B H N D"],
    positions: Int[Array, "B N"],
    *,
    scale: float,
    window: int | None,
) -> Attention:
    """Causal attention of tokens over themselves. The tokens of a row are consecutive and end it.

    Rows without padding are read where they are. If some row has padding, the tokens of all rows are moved to the left,
    some heads at a time.

    Args:
        positions: -1 for padding, which is on the left.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    B, Hq, N, D = q.shape
    H = k.shape[1]
    G = Hq // H
    attend = partial(
        cudnn.dot_product_attention,
        scale=scale,
        qkv_layout="BNTH",
        sliding_window_length=window,
        return_residual=True,
    )
    lengths = jnp.sum(positions >= 0, axis=1, dtype=jnp.int32)
    place = jnp.arange(N)

    def rolled(x: Array, by: Int[Array, "n"]) -> Array:
        """Rolls each row by a number of tokens of its own."""
        index = (place - by[:, None]) % N
        return jnp.take_along_axis(x, index.reshape(-1, 1, N, *(1,) * (x.ndim - 3)), axis=2)

    def some_heads(arrays: tuple[Array, ...]) -> Attention:
        """Attention of the query heads of some kv heads."""
        *tokens, lengths = arrays
        q, k, v = (rolled(x, lengths) for x in tokens)
        results = attend(q, k, v, q_seqlen=lengths, kv_seqlen=lengths, mask_type=cudnn.MaskType.PADDING_CAUSAL)
        out, lse = (rolled(x, -lengths) for x in results)
        exists = (place >= N - lengths[:, None])[:, None]
        return jnp.where(exists[..., None], out, 0), jnp.where(exists, lse, -jnp.inf)

    def padded() -> Attention:
        most = ROLLED_BYTES // (G * N * D * q.dtype.itemsize)
        at_once = next(n for n in range(B * H, 0, -1) if B * H % n == 0 and (n == 1 or n <= most))
        heads = (q.reshape(-1, at_once, G, N, D), *(x.reshape(-1, at_once, 1, N, D) for x in (k, v)))
        out, lse = jax.lax.map(some_heads, (*heads, jnp.repeat(lengths, H).reshape(-1, at_once)))
        return out.reshape(q.shape), lse.reshape(B, Hq, N)

    def unpadded() -> Attention:
        out, lse = attend(q, k, v, mask_type=cudnn.MaskType.CAUSAL)
        return out, lse

    return jax.lax.cond(jnp.all(lengths == N), unpadded, padded)


def in_front(q_positions: Int[Array, "B N"], k_positions: Int[Array, "B H M"]) -> Bool[Array, ""]:
    """Returns whether no row has padding, and all its entries are in the first slots and older than its new tokens."""
    occupied = k_positions >= 0
    first = jnp.arange(k_positions.shape[2]) < jnp.sum(occupied, axis=-1, keepdims=True)
    newest = jnp.max(k_positions, axis=(1, 2))
    return jnp.all(occupied == first) & jnp.all(q_positions > newest[:, None])


def over_slots(
    q: Float[Array, "B Hq N D"],
    k: Float[Array, "B H M D"],
    v: Float[Array, "B H M D"],
    q_positions: Int[Array, "B N"],
    k_positions: Int[Array, "B H M"],
    *,
    scale: float,
) -> Attention:
    """Attention of all tokens over all entries, which are `in_front`. Each kv head may have another number of them."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    B, Hq, N, D = q.shape
    H, M = k.shape[1:3]
    held = jnp.sum(k_positions >= 0, axis=-1, dtype=jnp.int32)
    out, lse = cudnn.dot_product_attention(
        q.reshape(B * H, -1, N, D),
        k.reshape(B * H, 1, M, D),
        v.reshape(B * H, 1, M, D),
        q_seqlen=jnp.full(B * H, N, jnp.int32),
        kv_seqlen=jnp.maximum(held, 1).reshape(-1),  # what a head without entries sees in an empty slot is left out
        scale=scale,
        qkv_layout="BNTH",
        mask_type=cudnn.MaskType.PADDING,
        return_residual=True,
    )
    lse = jnp.where(held[..., None, None] > 0, lse.reshape(B, H, -1, N), -jnp.inf)
    return out.reshape(q.shape), lse.reshape(B, Hq, N)

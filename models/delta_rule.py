"""The gated delta rule (arXiv 2412.06464): attention without a softmax, whose memory is a matrix per head.

With key k, query q, value v, decay a = exp(g) <= 1 and rate b in [0, 1], a token changes the memory S and reads it:

    S' = a S + k (b (v - a S^T k))^T,    o = S'^T q.

Everything is float32, and products are exact to float32 on every device.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

CHUNK = 64  # tokens whose updates are solved for together
BLOCK = 16  # chunks whose products are computed at once: more would take more memory, fewer keep a device less busy

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def read_token(
    q: Float[Array, "B H D"],
    k: Float[Array, "B H D"],
    v: Float[Array, "B H Dv"],
    g: Float[Array, "B H"],
    b: Float[Array, "B H"],
    memory: Float[Array, "B H D Dv"],
) -> tuple[Float[Array, "B H Dv"], Float[Array, "B H D Dv"]]:
    """Returns the output of one token per row, and the memory after it. The arguments are those of `read_tokens`."""
    memory = memory * jnp.exp(g)[..., None, None]
    change = b[..., None] * (v - _einsum("BHKV,BHK->BHV", memory, k))
    memory = memory + k[..., None] * change[..., None, :]
    return _einsum("BHKV,BHK->BHV", memory, q), memory


def read_tokens(
    q: Float[Array, "B H N D"],
    k: Float[Array, "B H N D"],
    v: Float[Array, "B H N Dv"],
    g: Float[Array, "B H N"],
    b: Float[Array, "B H N"],
    memory: Float[Array, "B H D Dv"],
) -> tuple[Float[Array, "B H N Dv"], Float[Array, "B H D Dv"]]:
    """Returns the outputs of N tokens per row, and the memory after them.

    Within a chunk, the updates solve a triangular system (section 3.3 of the paper). The memory goes from chunk to
    chunk.

    Args:
        q, k, v: queries, keys and values.
        g: the logarithm of the decay, <= 0. A token with g = 0 and b = 0 leaves the memory as it is.
        b: the rate.
        memory: before these tokens.
    """
    N = q.shape[2]
    chunks = -(-N // CHUNK)
    blocks = -(-chunks // BLOCK)
    size = -(-chunks // blocks)
    padding = blocks * size * CHUNK - N

    def cut(x: Float[Array, "B H N ..."]) -> Float[Array, "blocks B H chunks c ..."]:
        """Cuts the tokens into chunks from the last one on, so that padding before a text changes no chunk."""
        x = jnp.pad(x, [(0, 0), (0, 0), (padding, 0), *[(0, 0)] * (x.ndim - 3)])
        return jnp.moveaxis(x.reshape(*x.shape[:2], blocks, size, CHUNK, *x.shape[3:]), 2, 0)

    memory, out = jax.lax.scan(_block, memory, tuple(map(cut, (q, k, v, g, b))))
    joined = jnp.moveaxis(out, 0, 2)  # B H blocks chunks c Dv
    return joined.reshape(*joined.shape[:2], -1, joined.shape[-1])[:, :, padding:], memory


def _block(
    memory: Float[Array, "B H D Dv"], tokens: tuple[Array, ...]
) -> tuple[Float[Array, "B H D Dv"], Float[Array, "B H chunks c Dv"]]:
    """Reads a block of chunks, whose arrays have axes [B, H, chunks, c, ...]."""
    q, k, v, g, b = tokens
    causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    strict = jnp.tril(causal, -1)
    # The decay between two tokens is a sum of its own: a difference of sums from the chunk's beginning loses digits.
    sums = jnp.cumsum(jnp.where(strict, g[..., :, None], 0.0), axis=-2)
    between = jnp.exp(jnp.where(causal, sums, -jnp.inf))
    since = jnp.exp(jnp.cumsum(g, axis=-1))  # the decay from the memory before the chunk to each token
    rated = k * b[..., None]
    system = jnp.where(strict, _einsum("...ik,...jk->...ij", rated, k) * between, 0.0)
    right = jnp.concatenate([v * b[..., None], rated * since[..., None]], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(system, right, lower=True, unit_diagonal=True)
    values, keys = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    weights = _einsum("...ik,...jk->...ij", q, k) * between
    reading, writing = q * since[..., None], k * between[..., -1, :, None]

    def chunk(memory: Array, parts: tuple[Array, ...]) -> tuple[Array, Array]:
        values, keys, weights, reading, writing, decay = parts
        new = values - _einsum("BHcK,BHKV->BHcV", keys, memory)
        out = _einsum("BHcK,BHKV->BHcV", reading, memory) + _einsum("BHij,BHjV->BHiV", weights, new)
        return memory * decay[..., None, None] + _einsum("BHcK,BHcV->BHKV", writing, new), out

    parts = (values, keys, weights, reading, writing, since[..., -1])
    memory, out = jax.lax.scan(chunk, memory, tuple(jnp.moveaxis(x, 2, 0) for x in parts))
    return memory, jnp.moveaxis(out, 0, 2)

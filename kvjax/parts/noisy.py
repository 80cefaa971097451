"""Keyformer's score: attention from all queries so far, as it would be with noise on the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from kvjax.cache import LayerCache
from kvjax.policy import Policy
from kvjax.protocols import Attended, LayerShape, Moment, Score, check_integer

BLOCK = 32  # queries that are asked at once


@dataclass(frozen=True)
class NoisyAttention(Score):
    """Sum over all queries so far of softmax((logits + g) / tau), mean of the query group.

    g is drawn from the standard Gumbel distribution for each pair of a query and a key: a function of the seed, the
    layer, the query head and the two positions, and so the same in any company. tau is `temperature` for queries of
    prompts, and grows by `growth` with each token that a row decodes. The logits are computed once more, since a
    softmax with noise has a sum of its own. On a mesh where devices share a kv head, they exchange the group's queries.
    """

    temperature: float = 1.0
    growth: float = 0.01
    noise: Literal["gumbel", "none"] = "gumbel"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("temperature", "above 0"), ("growth", "0 or more")):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not (0 < value < float("inf") or (name == "growth" and value == 0)):
                raise ValueError(f"{name}={value!r}: accepted is a number, {least}")
        if self.noise not in ("gumbel", "none"):
            raise ValueError(f"noise={self.noise!r}: accepted are 'gumbel' and 'none'")
        check_integer("seed", self.seed, least=0)

    def check(self, policy: Policy) -> None:
        if policy.positions != "original":
            raise ValueError(
                "NoisyAttention asks the cached keys again, as they were rotated when they came in; it cannot be "
                f"combined with positions={policy.positions!r}"
            )

    def init_slots(self, shape: LayerShape, slots: int) -> Float[Array, "B H S"]:
        return jnp.zeros((shape.batch, shape.kv_heads, slots), jnp.float32)

    def init_rows(self, shape: LayerShape) -> Int[Array, "B H"]:
        """Tokens decoded so far."""
        return jnp.zeros((shape.batch, shape.kv_heads), jnp.int32)

    def observe(self, entries: LayerCache, attended: Attended) -> tuple[Array, Array]:
        decoded = entries.per_row
        if attended.decoding:
            decoded = decoded + (attended.lengths > 0)[:, None]
        queries, positions = attended.heads.whole_groups(attended.queries), attended.positions
        B, Hq, W, D = queries.shape
        H, M = entries.positions.shape[1:]
        block = min(BLOCK, W)
        short = -W % block
        queries = jnp.pad(queries.reshape(B, H, Hq // H, W, D), [(0, 0)] * 3 + [(short, 0), (0, 0)])
        positions = jnp.pad(positions, [(0, 0), (short, 0)], constant_values=-1)
        keys = self._keys(attended, H, Hq // H)
        tau = self.temperature + self.growth * decoded.astype(jnp.float32)

        def add(total: Array, start: Array) -> tuple[Array, None]:
            q = jax.lax.dynamic_slice_in_dim(queries, start, block, axis=3)
            at = jax.lax.dynamic_slice_in_dim(positions, start, block, axis=1)[:, None, :, None]
            held = entries.positions[:, :, None]
            visible = (held >= 0) & (held <= at)
            if attended.window is not None:
                visible &= held > at - attended.window
            logits = jnp.einsum("BHGRD,BHMD->BHGRM", q, entries.keys, preferred_element_type=jnp.float32)
            logits = logits * attended.scale
            if entries.bias is not None:
                logits = logits + entries.bias[:, :, None, None]
            if self.noise == "gumbel":
                logits = logits + gumbel(keys[None, :, :, None, None], at[:, :, None], held[:, :, None])
            logits = jnp.where(visible[:, :, None], logits / tau[:, :, None, None, None], -jnp.inf)
            top = jnp.max(logits, axis=-1, keepdims=True)
            weights = jnp.exp(logits - jnp.where(jnp.isneginf(top), 0, top))
            weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
            return total + jnp.sum(jnp.mean(weights, axis=2), axis=2), None

        received, _ = jax.lax.scan(add, jnp.zeros((B, H, M), jnp.float32), jnp.arange(0, W + short, block))
        return entries.per_slot + received, decoded

    def __call__(self, entries: LayerCache, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot

    def _keys(self, attended: Attended, kv_heads: int, group: int) -> UInt32[Array, "H G 2"]:
        """One for each query head, by its number in the layer."""
        layer = jax.random.fold_in(jax.random.key(self.seed), attended.layer)
        numbers = attended.heads.kv_indices(kv_heads)[:, None] * group + jnp.arange(group)
        return jax.random.key_data(jax.vmap(jax.vmap(lambda number: jax.random.fold_in(layer, number)))(numbers))


def gumbel(key: UInt32[Array, "... 2"], query: Int[Array, "..."], position: Int[Array, "..."]) -> Float[Array, "..."]:
    """Standard Gumbel noise of a head's key and two positions: a hash, since a prompt has as many draws as logits."""

    def mix(x: Array) -> Array:
        """The finaliser of MurmurHash3."""
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    x = mix(key[..., 0] ^ mix(query.astype(jnp.uint32) + jnp.uint32(0x9E3779B9)))
    x = mix(key[..., 1] ^ x ^ mix(position.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)))
    uniform = ((x >> 8).astype(jnp.float32) + 0.5) * 2.0**-24
    return -jnp.log(-jnp.log(uniform))

"""Keyformer (Adnan et al., MLSys 2024, arXiv 2403.09054): heavy hitters under noise.

Differences from the paper and its code: the noise is a function of the seed, the layer, the query head and the two
positions, so that a row's result does not depend on its batch; the released code draws it from a global generator. The
released code also adds up scores over the rows of a batch; here each row has its own. Evicted tokens never return; the
released code for GPT-J masks them and keeps them in memory. The temperature grows with the tokens that a row decodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from kvjax.cache import Slots
from kvjax.policy import (
    Attended,
    LayerShape,
    Moment,
    Needs,
    Policy,
    Protect,
    Score,
    check_choice,
    check_integer,
    check_number,
)

from .common.budgets import budget_of
from .common.drop import Drop
from .common.top_tokens import TopTokens
from .registry import preset

BLOCK = 32  # queries that are scored at once


@dataclass(frozen=True)
class NoisyAttention(Score):
    """The sum over all queries so far of softmax((logits + g) / tau), averaged over the query group.

    g is drawn from the standard Gumbel distribution for each pair of a query and a key. It is a function of the seed,
    the layer, the query head and the two positions, and therefore the same in any batch. The logits are computed a
    second time, since a softmax with noise has a sum of its own. On a mesh where devices hold the same kv head, they
    exchange the group's queries.

    Attributes:
        temperature: tau for queries of prompts.
        growth: the increase of tau with each token that a row decodes.
        noise: "gumbel", or "none" for g = 0.
        seed: of the noise.
    """

    temperature: float = 1.0
    growth: float = 0.01
    noise: Literal["gumbel", "none"] = "gumbel"
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "a finite number > 0", lambda x: x > 0)
        check_number("growth", self.growth, "a finite number >= 0", lambda x: x >= 0)
        check_choice("noise", self.noise, "gumbel", "none")
        check_integer("seed", self.seed, least=0)

    @property
    def needs(self) -> Needs:
        return Needs(queries="rotated", accumulates=True)

    def check(self, policy: Policy) -> None:
        if policy.positions != "original":
            raise ValueError(
                "NoisyAttention scores the cached keys as they were rotated when they came in; it cannot be combined "
                f"with positions={policy.positions!r}"
            )

    def init(self, shape: LayerShape, slots: int) -> tuple[Float[Array, "B H S"], Int[Array, "B H"]]:
        """The sums, and the number of tokens decoded so far."""
        sums = jnp.zeros((shape.batch, shape.kv_heads, slots), jnp.float32)
        return sums, jnp.zeros((shape.batch, shape.kv_heads), jnp.int32)

    def observe(self, entries: Slots, attended: Attended) -> tuple[Float[Array, "B H M"], Int[Array, "B H"]]:
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

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot

    def _keys(self, attended: Attended, kv_heads: int, group: int) -> UInt32[Array, "H G 2"]:
        """The random key of each query head, by its number in the layer."""
        layer = jax.random.fold_in(jax.random.key(self.seed), attended.layer.index)
        numbers = attended.heads.kv_indices(kv_heads)[:, None] * group + jnp.arange(group)
        return jax.random.key_data(jax.vmap(jax.vmap(lambda number: jax.random.fold_in(layer, number)))(numbers))


def gumbel(key: UInt32[Array, "... 2"], query: Int[Array, "..."], position: Int[Array, "..."]) -> Float[Array, "..."]:
    """Standard Gumbel noise for a head's key and two positions, float32.

    It is a hash, because a prompt of N tokens needs N^2 / 2 draws per query head.
    """

    def mix(x: Array) -> Array:
        """The finaliser of MurmurHash3."""
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    x = mix(key[..., 0] ^ mix(query.astype(jnp.uint32) + jnp.uint32(0x9E3779B9)))
    x = mix(key[..., 1] ^ x ^ mix(position.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)))
    uniform = ((x >> 8).astype(jnp.float32) + 0.5) * 2.0**-24
    return -jnp.log(-jnp.log(uniform))


@preset
def keyformer(
    budget: int | float = 0.6,
    recent: int | float = 0.3,
    temperature: float = 1.0,
    growth: float = 0.01,
    noise: Literal["gumbel", "none"] = "gumbel",
    seed: int = 0,
    every: int | None = 1,
) -> Policy:
    """Retains recent tokens and key tokens: those that receive the most attention under noise and a temperature.

    score[h, c] = sum over all queries r of the prompt and the answer of softmax((scale * q_r . k + g_r) / tau)_c,
    averaged over the query group of h, with g from the standard Gumbel distribution and tau = temperature + growth *
    (the number of tokens that the row has decoded). With noise="none" and growth=0 this is H2O.

    Args:
        budget: the entries that a query sees, itself included. An integer >= 1, or a float in (0, 1] for that share of
            each row's prompt (the paper: 0.6).
        recent: the number of most recent tokens, which are always retained, or a float in [0, 1) for that share of the
            budget (the paper: 0.3).
        temperature: tau while a prompt is read.
        growth: the increase of tau with each decoded token.
        noise: "gumbel", or "none", which leaves the temperature alone.
        seed: of the noise.
        every: the number of tokens that are evicted at a time while decoding; None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than recent + `every`.
    """
    return Policy(
        score=NoisyAttention(temperature, growth, noise, seed),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(recent=recent),
        every=every,
    )

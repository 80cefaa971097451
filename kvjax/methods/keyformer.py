"""Keyformer (Adnan et al., MLSys 2024, arXiv 2403.09054): retains heavy hitters of attention with noise on its logits.

Differences from the paper and its code:

- The noise is a function of the seed, the layer, the query head and the two positions, so that a row's result does not
  depend on its batch. The released code draws it from a global generator.
- Each row sums its own scores. The released code adds up scores over the rows of a batch.
- Evicted tokens never return. The released code for GPT-J masks them and keeps them in memory.
- The temperature grows with the tokens that a row decodes.
- The noisy softmax is over entries alone. A model's attention sinks do not join it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from kvjax.cache import Slots
from kvjax.pallas_kernels import capped, finite_or_zero
from kvjax.pallas_kernels.arrays import pad
from kvjax.pallas_kernels.visibility import span, visible, visible_tiles
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
from .common.refusals import check_own_positions
from .registry import preset

ROWS = 64  # queries that are scored at once
KEYS = 512  # entries per tile; with few queries, a tile has more
STEEP = 0.25  # the temperature below which exp((logit + g - lse) / tau) may overflow, since g <= 16.7
ROOT_HALF = 0x3F3504F3  # the bits of 0.5^0.5
# log2(1 + z) / z for 1 + z in [0.5^0.5, 2^0.5), lowest power first: the smallest maximum of the relative error
LOG2 = (1.44270162, -0.72120671, 0.47981066, -0.36648789, 0.3182109, -0.20621108)


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
        return Needs(queries="rotated", marks=frozenset({"accumulates"}))

    def check(self, policy: Policy) -> None:
        check_own_positions(policy, "scores the cached keys as they were rotated when they came in")

    def init(self, shape: LayerShape) -> tuple[Float[Array, "B H S"], Int[Array, "B H"]]:
        """Returns the sums, and the number of tokens decoded so far."""
        sums = shape.per_slot()
        return sums, jnp.zeros((shape.batch, shape.kv_heads), jnp.int32)

    def observe(self, entries: Slots, attended: Attended) -> tuple[Float[Array, "B H M"], Int[Array, "B H"]]:
        decoded = entries.per_row
        if attended.decoding:
            decoded = decoded + (attended.lengths > 0)[:, None]
        cooling = 1 / (self.temperature + self.growth * decoded.astype(jnp.float32))[:, :, None, None, None]
        queries = attended.heads.whole_groups(attended.queries)
        # With devices that share a kv head, the log-sum-exp of the whole group would have to be gathered as well.
        # With sinks it may be far above all logits of entries.
        by_peak = self.temperature < STEEP or attended.heads.group_axis is not None or attended.layer.sinks is not None
        lse = jnp.zeros(queries.shape[:3]) if by_peak else attended.lse
        B, Hq, W, D = queries.shape
        H, M = entries.positions.shape[1:]
        G, rows = Hq // H, min(ROWS, W)
        size = min(KEYS * ROWS // rows, M)
        queries = pad(queries.reshape(B, H, G, W, D) * attended.scale, -W % rows, axis=3)
        lse = pad(finite_or_zero(lse).reshape(B, H, G, W), -W % rows, axis=3)
        positions = pad(attended.positions, -W % rows, axis=1, value=-1)
        held = pad(entries.positions, -M % size, axis=2, value=-1)
        keys = pad(entries.keys, -M % size, axis=2)
        bias = None if entries.bias is None else pad(entries.bias, -M % size, axis=2)
        of_query = query_bits(self._keys(attended, H, G)[:, :, None], positions[:, None, None])
        of_entry = position_bits(held)

        def tile_of(tile: Array, x: Array, axis: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, tile * size, size, axis)

        def noisy(block: Array, tile: Array, bits: UInt32[Array, "B H M"]) -> Float[Array, "B H G R M"]:
            """Returns (logits + g - log-sum-exp) / tau of a block of queries and a tile of entries."""
            own = partial(jax.lax.dynamic_slice_in_dim, start_index=block * rows, slice_size=rows)
            near = partial(tile_of, tile)
            q, k = own(queries, axis=3), near(keys, axis=2)
            logits = jnp.einsum("BHGRD,BHMD->BHGRM", q, k, preferred_element_type=jnp.float32)
            logits = capped(logits, attended.layer.softcap) - own(lse, axis=3)[..., None]
            if bias is not None:
                logits = logits + near(bias, axis=2)[:, :, None, None]
            if self.noise == "gumbel":
                logits = logits + gumbel(own(of_query, axis=3)[..., None], bits[:, :, None, None])
            seen = visible(own(positions, axis=1), near(held, axis=2), attended.window)[:, :, None]
            return jnp.where(seen, logits * cooling, -jnp.inf)

        tiles, blocks = held.shape[2] // size, positions.shape[1] // rows
        bounds = visible_tiles(positions, held, rows=rows, keys=size, window=attended.window)
        bounds = span(jnp.any(bounds, axis=(0, 1)).T)

        def add(carry: tuple[Array, Array], block: Array) -> tuple[tuple[Array, Array], None]:
            """Adds what entries receive from a block of queries. Its weights are the second part of the carry."""
            first, last = bounds[block]
            peak = jnp.zeros((B, H, G, rows))
            if by_peak:

                def higher(tile: Array, peak: Array) -> Array:
                    return jnp.maximum(peak, jnp.max(noisy(block, tile, tile_of(tile, of_entry, 2)), axis=-1))

                peak = jax.lax.fori_loop(first, last, higher, peak - jnp.inf)
                peak = finite_or_zero(peak)

            def fill(tile: Array, found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                """Adds a tile's weights to those found, and to their sum.

                A tile's bits are a part of the loop's state. XLA would otherwise fuse their slice with the noise, whose
                loop a CPU then does not vectorise.
                """
                weights, total, bits = found
                new = jnp.exp(noisy(block, tile, bits) - peak[..., None])
                weights = jax.lax.dynamic_update_index_in_dim(weights, new, tile, axis=0)
                return weights, total + jnp.sum(new, axis=-1), tile_of(tile + 1, of_entry, 2)

            received, weights = carry
            begin = weights, jnp.zeros_like(peak), tile_of(first, of_entry, 2)
            weights, total, _ = jax.lax.fori_loop(first, last, fill, begin)
            shares = 1 / (G * jnp.maximum(total, 1e-30))

            def hand_out(tile: Array, received: Array) -> Array:
                return received.at[tile].add(jnp.einsum("BHGR,BHGRM->BHM", shares, weights[tile]))

            return (jax.lax.fori_loop(first, last, hand_out, received), weights), None

        begin = (jnp.zeros((tiles, B, H, size), jnp.float32), jnp.zeros((tiles, B, H, G, rows, size), jnp.float32))
        (received, _), _ = jax.lax.scan(add, begin, jnp.arange(blocks))
        received = jnp.moveaxis(received, 0, 2).reshape(B, H, -1)[..., :M]
        return entries.per_slot + received, decoded

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot

    def _keys(self, attended: Attended, kv_heads: int, group: int) -> UInt32[Array, "H G 2"]:
        """Returns the random key of each query head, by its number in the layer."""
        layer = jax.random.fold_in(jax.random.key(self.seed), attended.layer.index)
        numbers = attended.heads.kv_indices(kv_heads)[:, None] * group + jnp.arange(group)
        return jax.random.key_data(jax.vmap(jax.vmap(lambda number: jax.random.fold_in(layer, number)))(numbers))


def query_bits(key: UInt32[Array, "... 2"], query: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns the part of the noise's hash that a head's random key and a query's position decide."""
    return key[..., 1] ^ _mix(key[..., 0] ^ _mix(query.astype(jnp.uint32) + jnp.uint32(0x9E3779B9)))


def position_bits(position: Int[Array, "..."]) -> UInt32[Array, "..."]:
    """Returns the part of the noise's hash that an entry's position decides."""
    return _mix(position.astype(jnp.uint32) * jnp.uint32(0x9E3779B1))


def gumbel(of_query: UInt32[Array, "..."], of_position: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Returns standard Gumbel noise for pairs of a query and an entry, float32, from their bits.

    It is a hash, because a prompt of N tokens needs N^2 / 2 draws per query head. -log(-log u) is computed from 23
    random bits, so it lies between -2.8 and 16.7.
    """
    x = of_query ^ of_position
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    from_one = jax.lax.bitcast_convert_type((x >> 9) | jnp.uint32(0x3F800000), jnp.float32)  # 1 + j / 2^23
    uniform = from_one - (1 - 2.0**-24)
    return -math.log(2) * _log2(-_log2(uniform)) - math.log(math.log(2))


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Applies the finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _log2(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes log2 of positive normal numbers, relative error 8e-6, in half the time of XLA's log on a CPU.

    x = 2^e (1 + z) with 1 + z in [0.5^0.5, 2^0.5), so that the logarithm is e + z P(z).
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) - ROOT_HALF
    z = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) + ROOT_HALF, jnp.float32) - 1
    polynomial = reduce(lambda total, power: total * z + power, reversed(LOG2), jnp.zeros_like(z))
    return (bits >> 23).astype(jnp.float32) + z * polynomial


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

        score[h, c] = sum over all queries r of the prompt and the answer of softmax((scale * q_r . k + g_r) / tau)_c
        tau = temperature + growth * (the number of tokens that the row has decoded)

    The sum is averaged over the query group of h, and g is drawn from the standard Gumbel distribution. With
    noise="none" and growth=0 this is H2O.

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
        protect=Protect(recent=recent),
        every=every,
    )

"""The merging sets of KVMerger, runs of similar neighbours, in parallel form. It knows arrays and no policies.

Tokens are packed, n of N, in order of position. Sets are runs of tokens, and a set is identified by its last token, its
anchor. For all blocks of tokens at once, the anchors within the block are found for every token that a set may end at.
Then the anchor that reaches beyond its block is carried into the next block, in N / BLOCK steps for sets of any length.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

BLOCK = 32  # the number of keys that are compared with each other in one product, and of bits in an integer
ROUNDS = 12  # of bisection

Rule = Literal["anchor", "chain"]


class KeyBlocks(NamedTuple):
    """Packed tokens in J blocks of C.

    Attributes:
        keys: of Euclidean length 1.
        sections: the section of each token. Sets do not reach from one section into another.
        similarity: the cosine of token C with token K of its block, -inf between sections. Only K < C counts, so the
            others are inf.
        last: the index of the last token in all blocks, -1 if there is none.
    """

    keys: Float[Array, "B H J C D"]
    sections: Int[Array, "B H J C"]
    similarity: Float[Array, "B H J C K"]
    last: Int[Array, "B H"]

    @classmethod
    def of(cls, keys: Float[Array, "B H N D"], sections: Int[Array, "B H N"], counts: Int[Array, "B H"]) -> KeyBlocks:
        B, H, N = keys.shape[:3]
        blocks = -(-N // BLOCK)

        def cut(x: Array) -> Array:
            padded = jnp.pad(x, [(0, 0), (0, 0), (0, blocks * BLOCK - N)] + [(0, 0)] * (x.ndim - 3))
            return padded.reshape(B, H, blocks, BLOCK, *x.shape[3:])

        keys, sections = cut(keys), cut(sections)
        similarity = jnp.einsum("BHJCD,BHJKD->BHJCK", keys, keys, precision="highest")
        similarity = jnp.where(sections[..., None] == sections[..., None, :], similarity, -jnp.inf)
        before = jnp.arange(BLOCK) < jnp.arange(BLOCK)[:, None]
        return cls(keys, sections, jnp.where(before, similarity, jnp.inf), counts - 1)

    def anchors(self, theta: Float[Array, "B H"]) -> UInt32[Array, "J B H"]:
        """Returns a bit per token: 1 for the last token of each set, which Algorithm 1 compares the others with."""
        token = jnp.arange(BLOCK)
        follows = jnp.max(jnp.where(self.similarity <= theta[..., None, None, None], token, -1), axis=-1)
        follows = jnp.where(follows < 0, token, follows)  # the last anchor of its block follows itself
        marks = jnp.broadcast_to(jnp.uint32(1) << token.astype(jnp.uint32), follows.shape)
        for _ in range((BLOCK - 1).bit_length()):  # each round doubles the number of followers that are known
            marks = marks | jnp.take_along_axis(marks, follows, axis=-1)
            follows = jnp.take_along_axis(follows, follows, axis=-1)

        def enter(carried: tuple[Array, Array], number: Array) -> tuple[tuple[Array, Array], Array]:
            key, section = carried
            arrays = self.keys, self.sections, marks, follows
            keys, sections, own, next_own = (jax.lax.dynamic_index_in_dim(x, number, 2, False) for x in arrays)
            parted = jnp.einsum("BHCD,BHD->BHC", keys, key, precision="highest") <= theta[..., None]
            parted |= sections != section[..., None]
            begins = (self.last // BLOCK == number) & (self.last >= 0)
            entered = jnp.max(jnp.where(parted & (self.last >= number * BLOCK)[..., None], token, -1), axis=-1)
            entered = jnp.where(begins, self.last % BLOCK, entered)
            at = jnp.maximum(entered, 0)[..., None]
            found = jnp.where(entered >= 0, jnp.take_along_axis(own, at, axis=-1)[..., 0], 0)
            at = jnp.take_along_axis(next_own, at, axis=-1)
            key = jnp.where((entered >= 0)[..., None], jnp.take_along_axis(keys, at[..., None], axis=2)[:, :, 0], key)
            section = jnp.where(entered >= 0, jnp.take_along_axis(sections, at, axis=-1)[..., 0], section)
            return (key, section), found

        nothing = jnp.zeros_like(self.keys[:, :, 0, 0]), jnp.zeros_like(self.sections[:, :, 0, 0])
        return jax.lax.scan(enter, nothing, jnp.arange(self.keys.shape[2]), reverse=True)[1]


def set_ends(
    keys: Float[Array, "B H N D"],
    sections: Int[Array, "B H N"],
    counts: Int[Array, "B H"],
    theta: Float[Array, "B H"],
    rule: Rule,
) -> Bool[Array, "B H N"]:
    """Returns True for the last token of each set.

    Sets grow from the last token towards the first, while the section stays the same and a cosine is above theta. For
    "anchor", KVMerger's Algorithm 1, it is the cosine of the next token and the last token of the set; for "chain" it
    is that of neighbours.

    Args:
        keys: of Euclidean length 1, float32.
        sections: sets do not reach from one section into another.
        counts: the number of tokens of each head, which come first among the N.
        theta: the threshold of each head.
    """
    if rule == "chain":
        return _chain_ends(keys, sections, counts, theta)
    bits = jnp.moveaxis(KeyBlocks.of(keys, sections, counts).anchors(theta), 0, -1)[..., None]
    return (bits >> jnp.arange(BLOCK, dtype=jnp.uint32) & 1 > 0).reshape(*keys.shape[:2], -1)[..., : keys.shape[2]]


def solve_theta(
    keys: Float[Array, "B H N D"],
    sections: Int[Array, "B H N"],
    counts: Int[Array, "B H"],
    room: Int[Array, "B H"],
    rule: Rule,
) -> Float[Array, "B H"]:
    """Returns the largest theta, within 2 / 2**ROUNDS, for which each head has at most `room` sets, found by bisection.

    The number of sets grows with theta, always for "chain" and nearly always for "anchor". The sets fit in the room in
    any case, unless there are more sections than that: then theta is -1, which makes one set per section.
    """
    blocks = KeyBlocks.of(keys, sections, counts)

    def sets(theta: Array) -> Array:
        if rule == "chain":
            return jnp.sum(_chain_ends(keys, sections, counts, theta), axis=-1)
        return jnp.sum(jax.lax.population_count(blocks.anchors(theta)), axis=0).astype(jnp.int32)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        fits = sets(middle) <= room
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    bounds = jnp.full(room.shape, -1.0 - 1e-5), jnp.full(room.shape, 1.0)
    return jax.lax.fori_loop(0, ROUNDS, halve, bounds)[0]


def _chain_ends(keys: Array, sections: Array, counts: Array, theta: Array) -> Bool[Array, "B H N"]:
    similarity = jnp.sum(keys[:, :, :-1] * keys[:, :, 1:], axis=-1)
    parted = (similarity <= theta[..., None]) | (sections[..., :-1] != sections[..., 1:])
    index = jnp.arange(keys.shape[2])
    parted = jnp.pad(parted, ((0, 0), (0, 0), (0, 1)), constant_values=True) | (index == counts[..., None] - 1)
    return parted & (index < counts[..., None])

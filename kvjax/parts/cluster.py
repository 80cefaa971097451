"""Runs of similar neighbours: the merging sets of KVMerger, in parallel form. Arrays only, no policies.

Tokens are packed, n of N, in order of position. Sets are runs of them, told by which token is the last of one, its
anchor.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK = 64  # keys that are compared with each other in one product

Rule = Literal["anchor", "chain"]


def set_ends(
    keys: Float[Array, "B H N D"],
    sections: Int[Array, "B H N"],
    counts: Int[Array, "B H"],
    theta: Float[Array, "B H"],
    rule: Rule,
) -> Bool[Array, "B H N"]:
    """True for the last token of each set.

    Sets grow from the last token towards the first while the section is the same and the cosine above theta: of the
    next token and the set's last one ("anchor", KVMerger's Algorithm 1), or of neighbours ("chain").

    Args:
        keys: of Euclidean length 1, float32.
        sections: sets do not reach from one into another.
        counts: tokens of each head, the first so many of the N.
    """
    if rule == "chain":
        return _chain_ends(keys, sections, counts, theta)
    return _orbit(_next_anchors(keys, sections, counts, theta), counts)


def solve_theta(
    keys: Float[Array, "B H N D"],
    sections: Int[Array, "B H N"],
    counts: Int[Array, "B H"],
    room: Int[Array, "B H"],
    rule: Rule,
    rounds: int = 12,
) -> Float[Array, "B H"]:
    """The largest theta, to 2 / 2**rounds, for which each head has at most `room` sets, found by bisection.

    The number of sets grows with theta, for "chain" always, for "anchor" nearly so; the answer keeps within the room in
    any case, unless there are more sections than that, when it is -1: one set a section.
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        fits = jnp.sum(set_ends(keys, sections, counts, middle, rule), axis=-1) <= room
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    bounds = jnp.full(room.shape, -1.0 - 1e-5), jnp.full(room.shape, 1.0)
    return jax.lax.fori_loop(0, rounds, halve, bounds)[0]


def _chain_ends(keys: Array, sections: Array, counts: Array, theta: Array) -> Bool[Array, "B H N"]:
    similarity = jnp.sum(keys[:, :, :-1] * keys[:, :, 1:], axis=-1)
    parted = (similarity <= theta[..., None]) | (sections[..., :-1] != sections[..., 1:])
    index = jnp.arange(keys.shape[2])
    parted = jnp.pad(parted, ((0, 0), (0, 0), (0, 1)), constant_values=True) | (index == counts[..., None] - 1)
    return parted & (index < counts[..., None])


def _next_anchors(keys: Array, sections: Array, counts: Array, theta: Array) -> Int[Array, "B H N"]:
    """For every token, as if it were an anchor, the first before it that its set would not take in; -1 if none.

    All tokens look back at once, a block of keys further in each round, until each has met one: as many rounds as the
    longest set spans blocks, where a scan would take N steps.
    """
    B, H, N = keys.shape[:3]
    blocks = -(-N // BLOCK)

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, 0), (0, blocks * BLOCK - N)] + [(0, 0)] * (x.ndim - 3))
        return padded.reshape(B, H, blocks, BLOCK, *x.shape[3:])

    keys, sections = cut(keys), cut(sections)
    index = jnp.arange(blocks * BLOCK).reshape(blocks, BLOCK)

    def undecided(back: Array, found: Array) -> Bool[Array, "B H J C"]:
        reaches = jnp.arange(blocks)[:, None] >= back
        return (found < 0) & reaches & (index < counts[..., None, None])

    def look(state: tuple[Array, Array]) -> tuple[Array, Array]:
        back, found = state
        others, other_sections, other_index = (
            jnp.roll(x, back, axis) for x, axis in ((keys, 2), (sections, 2), (index, 0))
        )
        similarity = jnp.einsum("BHJCD,BHJKD->BHJCK", keys, others, precision="highest")
        parted = similarity <= theta[..., None, None, None]
        parted |= sections[..., None] != other_sections[..., None, :]
        parted &= other_index[:, None] < index[..., None]
        latest = jnp.max(jnp.where(parted, other_index[:, None], -1), axis=-1)
        return back + 1, jnp.where(undecided(back, found), latest, found)

    start = jnp.int32(0), jnp.full((B, H, blocks, BLOCK), -1, jnp.int32)
    _, found = jax.lax.while_loop(lambda state: jnp.any(undecided(*state)), look, start)
    return found.reshape(B, H, -1)[..., :N]


def _orbit(following: Int[Array, "B H N"], counts: Int[Array, "B H"]) -> Bool[Array, "B H N"]:
    """The last token, the one that follows it, the one that follows that: each round doubles how many are known."""
    B, H, N = following.shape
    b, h = jnp.arange(B)[:, None, None], jnp.arange(H)[:, None]
    nowhere = jnp.full((B, H, 1), N)
    jump = jnp.concatenate([jnp.where(following < 0, N, following), nowhere], axis=-1)
    marked = jnp.arange(N + 1) == jnp.where(counts > 0, counts - 1, N)[..., None]

    def double(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        marked, jump = state
        return marked.at[b, h, jump].max(marked), jnp.take_along_axis(jump, jump, axis=-1)

    return jax.lax.fori_loop(0, N.bit_length(), double, (marked, jump))[0][..., :N]

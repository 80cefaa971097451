"""The retained key that is most like an evicted one, by blocks of evicted keys and pieces of the others."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Slots
from kvjax.pallas_kernels import compact

BLOCK, PIECE = 128, 2048  # the largest numbers of evicted entries and of others that are compared at once
# Cosines that differ by less count as equal. Otherwise rounding decides: in a first layer the key of a token has the
# same cosine with equal tokens at the same distance before and after it, and with each repetition of a token.
CLOSE = 1e-5


def pairs(
    entries: Slots, lost: Bool[Array, "B H S"], count: int, kept: Int[Array, "B H K"] | None
) -> tuple[Int[Array, "B H count"], Float[Array, "B H count"], Int[Array, "B H count"]]:
    """Returns at most `count` lost entries of each head, and the entry nearest to each: (slots, cosines, slots).

    Lost entries are in order of position, and -1 where there is none. Cosines are those of `search`.

    Args:
        kept: the slots of the entries that take others in; None for all that are not lost.
    """
    b, h = jnp.arange(lost.shape[0])[:, None, None], jnp.arange(lost.shape[1])[:, None]
    victims = _by_position(compact(lost, count), entries.positions)
    others = replace(entries, positions=jnp.where(lost, -1, entries.positions), per_slot=None, bias=None)
    if kept is not None:
        kept = _by_position(kept, entries.positions)
        ranks = jnp.where(kept >= 0, jnp.arange(kept.shape[-1]), -1)
        others = replace(others.gather(kept), positions=ranks)
    u, earliest = search(entries.keys[b, h, victims], jnp.sum(victims >= 0, axis=-1), others)
    if kept is None:
        return victims, u, jnp.argmax(others.positions[:, :, None] == earliest[..., None], axis=-1)
    return victims, u, jnp.take_along_axis(kept, earliest, axis=-1, mode="clip")


def _by_position(index: Int[Array, "B H E"], positions: Int[Array, "B H S"]) -> Int[Array, "B H E"]:
    """Returns the same entries in order of position; -1, which stands for no entry, comes last."""
    at = jnp.take_along_axis(positions, index, axis=-1)
    order = jnp.argsort(jnp.where(index >= 0, at, jnp.iinfo(jnp.int32).max), axis=-1)
    return jnp.take_along_axis(index, order, axis=-1)


def search(
    keys: Float[Array, "B H E D"], count: Int[Array, "B H"], others: Slots
) -> tuple[Float[Array, "B H E"], Int[Array, "B H E"]]:
    """Returns the largest cosine of each of the first `count` keys with those of the others, and the other's position.

    The cosine is -inf if there are no others. The position is undefined then, and so are all results of further keys.
    """
    B, H, E, D = keys.shape
    S = others.slots
    directions, far = _unit(others.keys), jnp.iinfo(jnp.int32).max
    at_once = E <= BLOCK or S <= PIECE
    width = S if at_once else PIECE
    end = jnp.max(jnp.where(others.positions >= 0, jnp.arange(1, S + 1), 0))
    pieces = (end + width - 1) // width

    def cosines(keys: Float[Array, "B H n D"], i: Array | int) -> tuple[Array, Array]:
        """Returns the cosines of unit keys and piece i of the others, -inf for empty slots, and its positions."""
        first = jnp.minimum(i * width, S - width)  # the last piece ends with the last slot
        part, positions = (jax.lax.dynamic_slice_in_dim(x, first, width, 2) for x in (directions, others.positions))
        found = jnp.einsum("BHED,BHSD->BHES", keys, part, precision="highest")
        return jnp.where(positions[:, :, None] >= 0, found, -jnp.inf), positions[:, :, None]

    def earliest(piece: tuple[Array, Array], best: Float[Array, "B H n"]) -> Int[Array, "B H n"]:
        """Returns the first position in a piece of those as near as `best`."""
        found, positions = piece
        return jnp.min(jnp.where(found >= best[..., None] - CLOSE, positions, far), axis=-1)

    def compare(keys: Float[Array, "B H n D"]) -> tuple[Float[Array, "B H n"], Int[Array, "B H n"]]:
        keys = _unit(keys)
        if at_once:
            piece = cosines(keys, 0)
            best = jnp.max(piece[0], axis=-1)
            return best, earliest(piece, best)

        def nearer(i: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
            best, position, unsure = found
            piece = cosines(keys, i)
            own = jnp.max(piece[0], axis=-1)
            at = earliest(piece, own)
            rival = jnp.abs(own - best) <= 2 * CLOSE  # twice, so that rounding leaves no pair out
            takes = jnp.where(rival, at < position, own > best)
            # What is close to the nearer of two rivals is among what is close to each, but need not be the earliest.
            unsure |= jnp.any(rival & (own != best))
            return jnp.maximum(own, best), jnp.where(takes, at, position), unsure

        def again(i: Array, position: Int[Array, "B H n"]) -> Int[Array, "B H n"]:
            return jnp.minimum(position, earliest(cosines(keys, i), best))

        none = jnp.full(keys.shape[:3], far)
        first = jnp.full(keys.shape[:3], -jnp.inf), none, jnp.array(False)
        best, position, unsure = jax.lax.fori_loop(0, pieces, nearer, first)
        start = jnp.where(unsure, none, position)
        return best, jax.lax.fori_loop(0, jnp.where(unsure, pieces, 0), again, start)

    if E <= BLOCK:
        return compare(keys)
    blocks = jnp.moveaxis(jnp.pad(keys, [(0, 0), (0, 0), (0, -E % BLOCK), (0, 0)]).reshape(B, H, -1, BLOCK, D), 2, 0)

    def add(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        u, position = compare(blocks[i])
        return found[0].at[i].set(u), found[1].at[i].set(position)

    nothing = jnp.full(blocks.shape[:-1], -jnp.inf), jnp.zeros(blocks.shape[:-1], jnp.int32)
    u, position = jax.lax.fori_loop(0, (jnp.max(count) + BLOCK - 1) // BLOCK, add, nothing)
    u, position = (jnp.moveaxis(x, 0, 2).reshape(B, H, -1)[..., :E] for x in (u, position))
    return u, position


def _unit(keys: Float[Array, "B H M D"]) -> Float[Array, "B H M D"]:
    keys = keys.astype(jnp.float32)
    return keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-30)

"""What heads think of tokens, as bits, and of pages, whose bits are those of their tokens. Arrays only, no policies."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

FAR = jnp.iinfo(jnp.int32).max


class Pages(NamedTuple):
    """Tokens of each head by page: those whose positions have the same quotient by the page's size.

    Attributes:
        page: of each slot, a number from 0 up in the order of the text; M for a token that is in none.
        numbers: the quotient of each page, by which heads and rows call it; -1 after the last page.
        order: the slots in order of position, those in no page last.
    """

    page: Int[Array, "B H M"]
    numbers: Int[Array, "B H M"]
    order: Int[Array, "B H M"]

    @classmethod
    def of(cls, positions: Int[Array, "B H M"], members: Bool[Array, "B H M"], size: int) -> Pages:
        """The pages of the members; there may be as many as slots."""
        M = positions.shape[-1]
        slots = jnp.broadcast_to(jnp.arange(M), positions.shape)
        where, order = jax.lax.sort((jnp.where(members, positions, FAR), slots), num_keys=1)
        number = jnp.where(where < FAR, where // size, FAR)
        begins = number != jnp.pad(number, ((0, 0), (0, 0), (1, 0)), constant_values=-1)[..., :-1]
        page = jnp.where(number < FAR, jnp.cumsum(begins, axis=-1) - 1, M)
        b, h = jnp.arange(page.shape[0])[:, None, None], jnp.arange(page.shape[1])[:, None]
        numbers = jnp.full(page.shape, -1).at[b, h, page].set(number, mode="drop")
        return cls(jnp.zeros_like(page).at[b, h, order].set(page, unique_indices=True), numbers, order)

    def mean(self, x: Float[Array, "B H M"]) -> Float[Array, "B H M"]:
        """Of the tokens of each page; -inf where there is no page. Added up in the order of the text."""
        page, x = (jnp.take_along_axis(y, self.order, axis=-1) for y in (self.page, x))
        total, tokens = _add_up(x, page), _add_up(jnp.ones_like(x), page)
        return jnp.where(tokens > 0, total / jnp.maximum(tokens, 1), -jnp.inf)

    def tell(self, marks: Bool[Array, "B H M"]) -> Bool[Array, "B H M"]:
        """Whether a token's page is marked."""
        return jnp.take_along_axis(jnp.pad(marks, ((0, 0), (0, 0), (0, 1))), self.page, axis=-1)


class Signatures(NamedTuple):
    """The bits of tokens, or of pages of up to W tokens, where those of a token that is not there are 0.

    Attributes:
        bits: of each token, one for each of F heads.
        page: the page that it is in, M for none; None if tokens stand for themselves.
        place: which of its page's tokens it is, 0 .. W - 1.
        width: W.
    """

    bits: Bool[Array, "B H M F"]
    page: Int[Array, "B H M"] | None = None
    place: Int[Array, "B H M"] | int = 0
    width: int = 1

    def distance(self, anchor: Bool[Array, "B #H W F"]) -> Int[Array, "B H M"]:
        """The Hamming distance of each token or page to the anchor."""
        ones = jnp.sum(anchor, axis=(-2, -1))
        at = jnp.broadcast_to(anchor, (*self.bits.shape[:2], *anchor.shape[2:]))
        return ones[..., None] + self._sum_ones(1 - 2 * self._at_place(at.astype(jnp.int32)))

    def excess(self, marked: Bool[Array, "B H M"]) -> Float[Array, "B H W F"]:
        """How many more of the marked have a 1 than a 0, bit by bit."""
        ones = self._count(jnp.where(marked, 0, 1), 1)[:, :, 0]
        return (2 * ones - jnp.sum(marked, axis=-1)[..., None, None]).astype(jnp.float32)

    def distance_to_mean(self, run: Int[Array, "B H M"], runs: int) -> Int[Array, "B H M"]:
        """In L1, to the mean of a run of tokens or pages, times its size, which makes it an integer.

        Args:
            run: of each token or page, `runs` for none.
        """
        B, H, _, F = self.bits.shape
        ones = self._count(run, runs)
        sizes = _add_up(jnp.ones_like(run), run, runs + 1)
        own = self._of_token(run, runs)
        index = own * self.width + self.place
        flat = jnp.pad(ones, ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))).reshape(B, H, -1, F)
        of_run = jnp.take_along_axis(flat, index[..., None], axis=2)
        of_size = jnp.take_along_axis(sizes, own, axis=-1)[..., None]
        total = jnp.pad(jnp.sum(ones, axis=(-2, -1)), ((0, 0), (0, 0), (0, 1)))
        return jnp.take_along_axis(total, run, axis=-1) + self._sum_ones(of_size - 2 * of_run)

    def _of_token(self, x: Int[Array, "B H M"], nothing: int) -> Int[Array, "B H M"]:
        """What is said of pages, said of their tokens."""
        if self.page is None:
            return x
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, 1)), constant_values=nothing)
        return jnp.take_along_axis(padded, self.page, axis=-1)

    def _at_place(self, x: Int[Array, "B H W F"]) -> Int[Array, "B H #M F"]:
        return x if self.width == 1 else jnp.take_along_axis(x, jnp.asarray(self.place)[..., None], axis=2)

    def _sum_ones(self, weights: Int[Array, "B H #M F"]) -> Int[Array, "B H M"]:
        """Of each token or page, the weights of the bits that are 1."""
        sums = jnp.sum(jnp.where(self.bits, weights, 0), axis=-1)
        return sums if self.page is None else _add_up(sums, self.page)

    def _count(self, group: Int[Array, "B H M"], groups: int) -> Int[Array, "B H groups W F"]:
        """The ones of each bit in each group of tokens or pages."""
        B, H, _, F = self.bits.shape
        index = self._of_token(group, groups) * self.width + self.place
        counts = _add_up(self.bits.astype(jnp.int32), index, (groups + 1) * self.width)
        return counts.reshape(B, H, groups + 1, self.width, F)[:, :, :groups]


def _add_up(x: Array, group: Int[Array, "B H M"], groups: int | None = None) -> Array:
    """Sums over the entries of each group, M of them by default; an entry beyond belongs to none."""
    add = partial(jax.ops.segment_sum, num_segments=group.shape[-1] if groups is None else groups)
    return jax.vmap(jax.vmap(add))(x, group)

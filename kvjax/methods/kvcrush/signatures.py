"""The bits of tokens and of pages, whose bits are those of their tokens. It knows no policies."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .pages import add_up


class Signatures(NamedTuple):
    """The bits of tokens, or of pages of up to W tokens. The bits of tokens that a page lacks are 0.

    Attributes:
        bits: of each token, one for each of F heads.
        page: the page of each token, M for none; None if every token is its own page.
        place: the place of each token within its page, 0 .. W - 1.
        width: W.
    """

    bits: Bool[Array, "B H M F"]
    page: Int[Array, "B H M"] | None = None
    place: Int[Array, "B H M"] | int = 0
    width: int = 1

    def distance(self, anchor: Bool[Array, "B #H W F"]) -> Int[Array, "B H M"]:
        """Returns the Hamming distance of each token or page to the anchor."""
        ones = jnp.sum(anchor, axis=(-2, -1))
        at = jnp.broadcast_to(anchor, (*self.bits.shape[:2], *anchor.shape[2:]))
        return ones[..., None] + self._sum_ones(1 - 2 * self._at_place(at.astype(jnp.int32)))

    def excess(self, marked: Bool[Array, "B H M"]) -> Float[Array, "B H W F"]:
        """Returns the number of marked tokens or pages with a 1 less the number of those with a 0, bit by bit."""
        ones = self._count(jnp.where(marked, 0, 1), 1)[:, :, 0]
        return (2 * ones - jnp.sum(marked, axis=-1)[..., None, None]).astype(jnp.float32)

    def distance_to_mean(self, run: Int[Array, "B H M"], runs: int) -> Int[Array, "B H M"]:
        """Returns the L1 distance to the mean of a run of tokens or pages, times the size of the run: an integer.

        Args:
            run: of each token or page, `runs` for none.
            runs: the number of runs.
        """
        B, H, _, F = self.bits.shape
        ones = self._count(run, runs)
        sizes = add_up(jnp.ones_like(run), run, runs + 1)
        own = self._of_token(run, runs)
        index = own * self.width + self.place
        flat = jnp.pad(ones, ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))).reshape(B, H, -1, F)
        of_run = jnp.take_along_axis(flat, index[..., None], axis=2)
        of_size = jnp.take_along_axis(sizes, own, axis=-1)[..., None]
        total = jnp.pad(jnp.sum(ones, axis=(-2, -1)), ((0, 0), (0, 0), (0, 1)))
        return jnp.take_along_axis(total, run, axis=-1) + self._sum_ones(of_size - 2 * of_run)

    def _of_token(self, x: Int[Array, "B H M"], nothing: int) -> Int[Array, "B H M"]:
        """Returns for each token a number of its page."""
        if self.page is None:
            return x
        padded = jnp.pad(x, ((0, 0), (0, 0), (0, 1)), constant_values=nothing)
        return jnp.take_along_axis(padded, self.page, axis=-1)

    def _at_place(self, x: Int[Array, "B H W F"]) -> Int[Array, "B H #M F"]:
        return x if self.width == 1 else jnp.take_along_axis(x, jnp.asarray(self.place)[..., None], axis=2)

    def _sum_ones(self, weights: Int[Array, "B H #M F"]) -> Int[Array, "B H M"]:
        """Returns for each token or page the sum of the weights of its bits that are 1."""
        sums = jnp.sum(jnp.where(self.bits, weights, 0), axis=-1)
        return sums if self.page is None else add_up(sums, self.page)

    def _count(self, group: Int[Array, "B H M"], groups: int) -> Int[Array, "B H groups W F"]:
        """Returns the ones of each bit in each group of tokens or pages."""
        B, H, _, F = self.bits.shape
        index = self._of_token(group, groups) * self.width + self.place
        counts = add_up(self.bits.astype(jnp.int32), index, (groups + 1) * self.width)
        return counts.reshape(B, H, groups + 1, self.width, F)[:, :, :groups]

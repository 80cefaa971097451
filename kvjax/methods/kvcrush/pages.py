"""Pages of tokens, and the selection of whole pages by their mean scores."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import mark
from kvjax.pallas_kernels import compact
from kvjax.policy import Ranked, Select, SelectWrapper, check_integer, check_kind

FAR = jnp.iinfo(jnp.int32).max
LONGEST = 2**16  # tokens of a page; bits are compared at each of its places


class PageMap(NamedTuple):
    """The tokens of each head by page. The tokens of a page are those whose positions have one quotient by its size.

    Attributes:
        page: for each slot, the page's number from 0 up in order of the text; M for a token that is in no page.
        numbers: the quotient of each page, which identifies the page in all heads; -1 after the last page.
        order: the slots in order of position, those in no page last.
    """

    page: Int[Array, "B H M"]
    numbers: Int[Array, "B H M"]
    order: Int[Array, "B H M"]

    @classmethod
    def of(cls, positions: Int[Array, "B H M"], members: Bool[Array, "B H M"], size: int) -> PageMap:
        """Returns the pages of the members, at most one per slot."""
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
        """Returns the mean over the tokens of each page, added up in order of the text; -inf where there is no page."""
        page, x = (jnp.take_along_axis(y, self.order, axis=-1) for y in (self.page, x))
        total, tokens = add_up(x, page), add_up(jnp.ones_like(x), page)
        return jnp.where(tokens > 0, total / jnp.maximum(tokens, 1), -jnp.inf)

    def tell(self, marks: Bool[Array, "B H M"]) -> Bool[Array, "B H M"]:
        """Returns for each token whether its page is marked."""
        return jnp.take_along_axis(jnp.pad(marks, ((0, 0), (0, 0), (0, 1))), self.page, axis=-1)


def add_up(x: Array, group: Int[Array, "B H M"], groups: int | None = None) -> Array:
    """Returns the sum over the entries of each group, M groups by default; an entry with a larger number is in none."""
    add = partial(jax.ops.segment_sum, num_segments=group.shape[-1] if groups is None else groups)
    return jax.vmap(jax.vmap(add))(x, group)


def fill(
    kept: Bool[Array, "B H M"], there: Bool[Array, "B H M"], counts: Int[Array, "B H"], size: int
) -> Int[Array, "B H size"]:
    """Returns the indices of the retained entries, or of all entries of a head that holds no more than its count."""
    fits = jnp.sum(there, axis=-1, keepdims=True) <= counts[..., None]
    return compact(jnp.where(fits, there, kept), size)


@dataclass(frozen=True)
class Pages(SelectWrapper):
    """Retains whole pages of tokens, those with the highest mean scores.

    A page is `page` consecutive positions of a row. Protected tokens stay by themselves; the other tokens of their page
    are a shorter page. A page takes `page` entries of the budget however few tokens it has, so slots may stay empty,
    unless all tokens fit. While decoding, the base alone decides, token by token. The selection communicates nothing
    between devices that its base does not.

    Attributes:
        base: selects by the scores of the pages. It must compare "scores".
        page: the number of positions in a page.
    """

    page: int = 32

    def __post_init__(self) -> None:
        check_page(self.page)
        check_entrywise(self.base)

    @property
    def compares(self) -> Literal["scores", "means", "other"]:
        return "means"

    def keep(self, ranked: Ranked) -> Int[Array, "B H size"]:
        scores, positions, counts, size, heads, _ = ranked
        protected, there = jnp.isposinf(scores), scores > -jnp.inf
        pages = PageMap.of(positions, there & ~protected, self.page)
        room = jnp.maximum(counts - jnp.sum(protected, axis=-1), 0) // self.page
        best = self.base.keep(Ranked(pages.mean(scores), pages.numbers, room, max(1, size // self.page), heads))
        return fill(protected | pages.tell(mark(best, scores.shape[-1])), there, counts, size)


def check_page(page: int) -> None:
    """Raises ValueError unless `page` is a number of positions in 1 .. LONGEST."""
    check_integer("page", page, least=1)
    if page > LONGEST:
        raise ValueError(f"page={page}: expected at most {LONGEST}")


def check_entrywise(base: Select) -> None:
    """Raises ValueError unless a selection can choose among pages."""
    check_kind("base", base, Select)
    if base.compares != "scores":
        raise ValueError(
            "chunks and pages are ranked by their mean scores, and the base's selection "
            f"{type(base).__name__} does not retain the highest scores one by one; choose a base with TopTokens"
        )

"""Budgets: how many entries each layer and head retains of a prompt. No budget of a method is here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction as Ratio
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.mesh.heads import Heads

from .part import Part, check_kind


@dataclass(frozen=True)
class Layout:
    """The requirements of an allocated budget on the pool that stores its entries.

    Attributes:
        groups: heads compete in this many groups of consecutive kv heads, and each group retains its own total. A mesh
            may not cut a group, so that what is retained depends on the number of groups and not on the mesh. None
            where all heads of a layer retain the same number.
        dense: the numbers of first and of last layers whose heads retain everything, prompt and answer.
        growing: the number of segments per lane that grow although the policy evicts while decoding; None: those of the
            dense layers.
        compares_protected: whether `allocate` receives the scores of protected entries instead of +inf.
    """

    groups: int | None = None
    dense: tuple[int, int] = (0, 0)
    growing: int | None = None
    compares_protected: bool = False

    def is_dense(self, layer: int, layers: int) -> bool:
        """Returns whether all heads of a layer retain everything."""
        first, last = self.dense
        return layer < first or layer >= layers - last

    def growing_segments(self, layers: int, heads: int) -> int:
        """Returns the number of segments of a lane with `heads` heads that grow under a policy that evicts."""
        return heads * sum(self.dense) if self.growing is None else self.growing

    def lanes(self, kv_heads: int) -> int:
        """Heads that compete lie in one lane; heads that retain equally many have lanes of their own."""
        return kv_heads if self.groups is None else self.groups


class Budget(Part):
    """The number of entries that each layer retains of a prompt."""

    @property
    def layout(self) -> Layout | None:
        """The layout of entries if the budget is allocated by score once all layers have read the prompt.

        None: every layer has its budget beforehand, and is compressed as soon as it has been read.
        """
        return None

    @property
    def smallest(self) -> int | None:
        """The smallest capacity of any layer; None if it depends on the prompt."""
        return None

    @property
    def plain(self) -> bool:
        """Tells whether it is the same number for all layers and no more. Any other budget is part of a method."""
        return False

    @property
    def pace(self) -> Ratio | None:
        """The slots by which a capacity rises with each token of the answer; None if it is that of the prompt.

        A budget that rises is the same for all layers, and `capacity` is asked again for all tokens of a row.
        """
        return None

    def check_model(self, layers: int, kv_heads: int) -> None:
        """Raises ValueError if this is no budget for a model with that many layers and kv heads."""
        return

    @abstractmethod
    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"] | None:
        """Returns the entries per kv head of each row in one of the model's `layers`; None if it retains everything.

        Lengths may be NumPy or JAX arrays; the result is of the same kind. Each entry follows from its own length.
        """


@dataclass(frozen=True)
class AllocatedBudget(Budget):
    """A budget that is allocated to layers and heads by their scores, to each prompt in its own way.

    The total of a row is the sum of another budget, that of the mean kv head, over all layers and heads. In a layer
    with a sliding window the mean kv head has no more entries than the window. All layers of a prompt are read before
    anything is dropped. The cache is then a pool of segments, `Segments`.

    Attributes:
        budget: entries of the mean kv head.
    """

    budget: Budget

    @property
    def layout(self) -> Layout:
        """The layout of entries: by default, all heads of a layer retain the same number."""
        return Layout()

    @property
    def smallest(self) -> int | None:
        return self.budget.smallest

    def check_model(self, layers: int, kv_heads: int) -> None:
        self.budget.check_model(layers, kv_heads)

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"] | None:
        """Returns the entries of the mean kv head."""
        return self.budget.capacity(layer, prompt_lengths, layers)

    def entries(self, means: Sequence[int], sizes: Sequence[int], heads: int) -> int:
        """Returns the most entries that a lane of `heads` heads retains of a prompt.

        Args:
            means: the most entries of the mean head of each layer.
            sizes: the most entries that a head of each layer has before it is compressed.
        """
        return heads * sum(means)

    @abstractmethod
    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        """Returns the entries of each head; their sum over a group and all layers is at most that of the means.

        Args:
            scores: +inf for protected entries (but see `Layout.compares_protected`), -inf for empty slots.
            means: entries of the mean kv head of each layer and row.
            least: no head retains fewer, as far as it has them.
            heads: the heads that the scores belong to.
        """


@lru_cache(4096)
def most_entries(budget: Budget, layer: int, prompt_size: int, layers: int) -> int | None:
    """Returns the largest capacity of a layer for prompts of up to `prompt_size` tokens; None if it retains everything.

    Of the lengths of a prompt of more than 2^21 tokens, the first and the last 2^20 count.
    """
    lengths: Any = np.arange(1, min(prompt_size, 2**20) + 1)
    if prompt_size > 2**20:
        lengths = np.append(lengths, np.arange(max(prompt_size - 2**20, 2**20), prompt_size) + 1)
    capacity = budget.capacity(layer, lengths, layers)
    return None if capacity is None else int(np.max(capacity, initial=0))


def check_alike(budget: Budget) -> None:
    """Raises ValueError unless a budget is the same for all layers."""
    check_kind("budget", budget, Budget)
    if not budget.plain or budget.layout is not None:
        raise ValueError(f"a budget of {budget}: expected one that is the same for all layers, such as Fixed")

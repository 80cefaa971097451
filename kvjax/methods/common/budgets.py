"""Budgets that are known before a prompt is read: everything, a number of entries, or a share of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Int

from kvjax.checks import shown
from kvjax.policy import Budget, check_integer, check_kind, check_share_of, share_of


@dataclass(frozen=True)
class Everything(Budget):
    """No limit: the cache grows with the text."""

    @property
    def plain(self) -> bool:
        return True

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> None:
        return None


@dataclass(frozen=True)
class Fixed(Budget):
    """The same number of entries for every kv head of every layer."""

    entries: int

    def __post_init__(self) -> None:
        if isinstance(self.entries, float) and 0 < self.entries <= 1:
            share = f"Fraction({self.entries}) is a share of the prompt"
            raise ValueError(f"budget={self.entries}: expected an integer >= 1; {share}")
        check_integer("budget", self.entries, least=1)

    @property
    def smallest(self) -> int:
        return self.entries

    @property
    def plain(self) -> bool:
        return True

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"]:
        return prompt_lengths * 0 + self.entries


@dataclass(frozen=True)
class Fraction(Budget):
    """A share of each row's own prompt, rounded down. It is counted in integers, so that 0.1 of 10 is 1."""

    share: float

    def __post_init__(self) -> None:
        check_share_of("budget", self.share, "the prompt")

    @property
    def plain(self) -> bool:
        return True

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"]:
        return share_of(self.share, prompt_lengths)


def budget_of(budget: int | float) -> Fixed | Fraction:
    """Returns the budget of a preset: an integer is entries per kv head, a float in (0, 1] a share of each prompt."""
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ValueError(f"budget={shown(budget)}: expected an integer >= 1 or a float in (0, 1]")
    return Fixed(budget) if isinstance(budget, int) else Fraction(budget)


@dataclass(frozen=True)
class DenseLayers(Budget):
    """Another budget, except that the first layers retain everything, prompt and answer.

    MorphKV's "layer-aware" variant (A.6 of its paper) has 3 dense layers, the paper on the norms of keys has 2.

    Attributes:
        budget: the budget of all other layers.
        first: the number of first layers that retain everything.
    """

    budget: Budget
    first: int

    def __post_init__(self) -> None:
        check_integer("dense_layers", self.first, least=0)
        check_kind("budget", self.budget, Budget)
        if self.budget.layout is not None or self.budget.pace is not None:
            raise ValueError(
                f"a budget of {self.budget}: expected one that is known before the prompt is read, such as Fixed or "
                "Fraction"
            )

    @property
    def smallest(self) -> int | None:
        return self.budget.smallest

    def check_model(self, layers: int, kv_heads: int) -> None:
        self.budget.check_model(layers, kv_heads)

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"] | None:
        return None if layer < self.first else self.budget.capacity(layer, prompt_lengths, layers)

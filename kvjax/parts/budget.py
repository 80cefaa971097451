"""How many entries each layer keeps."""

from __future__ import annotations

import fractions
import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.protocols import Budget, check_integer


@dataclass(frozen=True)
class Everything:
    """No limit: the cache grows with the text."""

    smallest = None

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> None:
        return None

    def slots(self, layer: int, prompt_size: int, layers: int) -> None:
        return None


@dataclass(frozen=True)
class Fixed:
    """The same number of entries for every kv head of every layer."""

    entries: int

    @property
    def smallest(self) -> int:
        return self.entries

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"]:
        return jnp.full(prompt_lengths.shape, self.entries, jnp.int32)

    def slots(self, layer: int, prompt_size: int, layers: int) -> int:
        return self.entries


@dataclass(frozen=True)
class Fraction:
    """That share of each row's own prompt, rounded down; counted in integers, so that 0.1 of 10 is 1."""

    share: float

    smallest = None

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"budget={self.share}: a share of the prompt is above 0 and at most 1")

    @property
    def ratio(self) -> fractions.Fraction:
        """The share, of which 0.1 is one tenth and no more."""
        return fractions.Fraction(self.share).limit_denominator(10_000)

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"]:
        whole, rest = jnp.divmod(prompt_lengths, self.ratio.denominator)
        return whole * self.ratio.numerator + rest * self.ratio.numerator // self.ratio.denominator

    def slots(self, layer: int, prompt_size: int, layers: int) -> int:
        return max(1, math.floor(prompt_size * self.ratio))


@dataclass(frozen=True)
class DenseLayers:
    """Another budget, but the first so many layers keep everything (MorphKV A.6, "layer-aware")."""

    budget: Budget
    first: int

    def __post_init__(self) -> None:
        check_integer("dense_layers", self.first, least=0)

    @property
    def smallest(self) -> int | None:
        return self.budget.smallest

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"] | None:
        return None if layer < self.first else self.budget.capacity(layer, prompt_lengths, layers)

    def slots(self, layer: int, prompt_size: int, layers: int) -> int | None:
        return None if layer < self.first else self.budget.slots(layer, prompt_size, layers)


def budget_of(budget: int | float) -> Fixed | Fraction:
    """A preset's `budget`: an integer is entries a kv head keeps, a float in (0, 1] that share of a row's prompt."""
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise ValueError(f"budget={budget!r}: accepted are an integer, or a float in (0, 1] for a share of the prompt")
    return Fixed(budget) if isinstance(budget, int) else Fraction(budget)

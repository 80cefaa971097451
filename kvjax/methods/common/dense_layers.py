"""A budget under which the first layers retain everything."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array, Int

from kvjax.policy import Budget, check_integer, check_kind


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
        if self.budget.layout is not None:
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

"""PyramidKV's budgets: layers near the input keep more than layers near the output."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.protocols import check_integer

from .budget import Fixed, Fraction


@dataclass(frozen=True)
class Pyramid:
    """Entries fall with the layer in an arithmetic sequence, whose mean is another budget.

    With b the budget without the window, N the prompt's length and L layers, layer l keeps beside the window

        high - l * step,    low = floor(b / beta),  high = 2 b - low,  step = floor((high - low) / (L - 1)).

    Attributes:
        budget: the mean over layers, window included.
        window: entries that every layer keeps of it.
        beta: the steepness: the last layer keeps the beta-th part of the mean.
        formula: "paper": as above, whatever the prompt, so that each layer's slots are what it keeps. "code": as
            released: high is at most N - window, what is cut being added to low; a prompt shorter than 2 b has the
            same budget in all layers. "kvpress": low and step as fractions, high at most N - window, the window within
            b, and the same for all layers unless N >= high >= low >= window. With "code" and "kvpress" slots are those
            of the prompt for which a layer keeps most: with a budget in entries no upper layer has fewer than that.
    """

    budget: Fixed | Fraction
    window: int
    beta: int = 20
    formula: Literal["paper", "code", "kvpress"] = "paper"

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=0)
        check_integer("beta", self.beta, least=1)
        if not isinstance(self.budget, Fixed | Fraction):
            raise ValueError(
                f"{self.budget} under Pyramid: accepted are Fixed and Fraction, whose layers are all alike"
            )
        if self.formula not in ("paper", "code", "kvpress"):
            raise ValueError(f"formula={self.formula!r}: accepted are 'paper', 'code' and 'kvpress'")

    @property
    def smallest(self) -> int | None:
        """The mean's: a layer that is given less than what is protected is raised to that."""
        return self.budget.smallest

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"]:
        mean = self.budget.capacity(layer, prompt_lengths, layers)
        return self._entries(jnp, mean, prompt_lengths, layer, layers)

    def slots(self, layer: int, prompt_size: int, layers: int) -> int:
        lengths = np.arange(1, prompt_size + 1)
        if isinstance(self.budget, Fixed):
            mean = np.full(prompt_size, self.budget.entries)
        else:
            mean = lengths * self.budget.ratio.numerator // self.budget.ratio.denominator
        return max(1, int(np.max(self._entries(np, mean, lengths, layer, layers))))

    def _entries(self, xp: ModuleType, mean: Any, lengths: Any, layer: int, layers: int) -> Any:
        """In `xp`, NumPy or jax.numpy, for prompts of these lengths [B] and their mean budgets [B]."""
        if layers == 1:
            return mean
        if self.formula == "kvpress":
            return self._kvpress(xp, mean, lengths, layer, layers)
        b, distant = xp.maximum(mean - self.window, 0), xp.maximum(lengths - self.window, 0)
        low = b // self.beta
        high = 2 * b - low
        if self.formula == "code":
            cut = high >= distant
            high = xp.where(cut, distant, high)
            low = xp.where(cut, 2 * b - distant, low)
        entries = high - layer * ((high - low) // (layers - 1)) + self.window
        if self.formula == "code":
            return xp.where(lengths < xp.maximum(2 * b, mean), mean, entries)
        return xp.minimum(entries, lengths) if isinstance(self.budget, Fraction) else entries

    def _kvpress(self, xp: ModuleType, b: Any, lengths: Any, layer: int, layers: int) -> Any:
        """high - layer * (high - low) / (layers - 1), rounded half to even, in integers: multiples of 1/beta."""
        beta, steps = self.beta, layers - 1
        low, high, distant = b, (2 * beta - 1) * b, beta * (lengths - self.window)
        cut = high >= distant
        low, high = xp.where(cut, 2 * beta * b - distant, low), xp.where(cut, distant, high)
        # (high * (steps - layer) + low * layer) / (steps * beta), whose numerator may exceed 32 bits
        whole = high // beta * (steps - layer) + low // beta * layer
        rest = high % beta * (steps - layer) + low % beta * layer + whole % steps * beta
        rounded, over = whole // steps + rest // (steps * beta), 2 * (rest % (steps * beta))
        rounded += (over > steps * beta) | ((over == steps * beta) & (rounded % 2 == 1))
        falls = (beta * lengths >= high) & (high >= low) & (low >= beta * self.window)
        return xp.where(falls, rounded, b)

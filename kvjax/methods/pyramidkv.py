"""PyramidKV (Cai et al., arXiv 2406.02069): retains more entries in layers near the input than near the output.

Differences from the paper and its code:

- Entries are stored per kv head, with scores reduced over the query group.
- Budgets follow from the mean budget alone, so every layer fills its slots whatever the prompt's length is.
- `formula="code"` is as released: the first layer is cut to the prompt, and layers have equal budgets for short
  prompts.
- `formula="kvpress"` is as kvpress has it: budgets are fractions before rounding, and the window is part of the mean.
- Both of these formulas depend on the prompt's length, and slots are those of the worst length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.policy import Budget, Policy, check_choice, check_integer

from .common.allocation import check_mean
from .common.budgets import budget_of
from .registry import preset
from .snapkv import snapkv


@dataclass(frozen=True)
class Pyramid(Budget):
    """Entries fall with the layer in an arithmetic sequence, whose mean is another budget.

    With b the budget without the window, N the prompt's length and L layers, layer l retains, beside the window,

        high - l * step,    low = floor(b / beta),  high = 2 b - low,  step = floor((high - low) / (L - 1)).

    Attributes:
        budget: the mean over layers, window included, the same for all layers.
        window: the entries of it that every layer retains.
        beta: the steepness: the last layer retains a beta-th of the mean.
        formula: "paper": as above, whatever the prompt's length, so that each layer's slots are its entries. "code": as
            released: high is at most N - window, and what that cuts is added to low; for a prompt shorter than 2 b all
            layers have the same budget. "kvpress": low and step are fractions, high is at most N - window, b includes
            the window, and all layers have the same budget unless N >= high >= low >= window. With "code" and "kvpress"
            a layer's slots are those of the prompt length for which it retains most: with a budget in entries no upper
            layer has fewer slots than that budget.

    Raises:
        ValueError: for a value that is not accepted, or a budget that is not the same for all layers.
    """

    budget: Budget
    window: int
    beta: int = 20
    formula: Literal["paper", "code", "kvpress"] = "paper"

    def __post_init__(self) -> None:
        check_integer("window", self.window, least=0)
        check_integer("beta", self.beta, least=1)
        check_mean(self.budget)
        check_choice("formula", self.formula, "paper", "code", "kvpress")

    @property
    def smallest(self) -> int | None:
        """The mean's smallest capacity: a layer with less than its protected entries is raised to those."""
        return self.budget.smallest

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"]:
        xp: Any = np if isinstance(prompt_lengths, np.ndarray) else jnp
        lengths, mean = prompt_lengths, self.budget.capacity(layer, prompt_lengths, layers)
        assert mean is not None
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
        of_prompt = self.budget.smallest is None  # a share of the prompt is at most all of it
        return xp.minimum(entries, lengths) if of_prompt else entries

    def _kvpress(self, xp: ModuleType, b: Any, lengths: Any, layer: int, layers: int) -> Any:
        """Rounds high - layer * (high - low) / (layers - 1) half to even, in integers: multiples of 1 / beta."""
        beta, steps = self.beta, layers - 1
        low, high, distant = b, (2 * beta - 1) * b, beta * (lengths - self.window)
        cut = high >= distant
        low, high = xp.where(cut, 2 * beta * b - distant, low), xp.where(cut, distant, high)
        # (high * (steps - layer) + low * layer) / (steps * beta), whose numerator may exceed 32 bits
        quotient = high // beta * (steps - layer) + low // beta * layer
        rest = high % beta * (steps - layer) + low % beta * layer + quotient % steps * beta
        rounded, over = quotient // steps + rest // (steps * beta), 2 * (rest % (steps * beta))
        rounded += (over > steps * beta) | ((over == steps * beta) & (rounded % 2 == 1))
        falls = (beta * lengths >= high) & (high >= low) & (low >= beta * self.window)
        return xp.where(falls, rounded, b)


@preset
def pyramidkv(
    budget: int | float = 1024,
    window: int = 8,
    kernel: int = 7,
    pool: Literal["max", "avg", "none"] = "max",
    group: Literal["mean", "max"] = "mean",
    beta: int = 20,
    formula: Literal["paper", "code", "kvpress"] = "paper",
) -> Policy:
    """Compresses the prompt by SnapKV's scores, with budgets that fall from layer to layer.

    Deeper layers attend to fewer tokens. With b = budget - window, low = floor(b / beta) and high = 2 b - low, layer l
    of L retains

        window + high - l * step entries,    step = floor((high - low) / (L - 1))

    with the highest scores of `snapkv`. The mean over layers is the budget, up to rounding. A model of one layer
    retains the budget. A layer that would retain no more than its window retains one entry more.

    Args:
        budget: the entries of a prompt that the mean layer retains per kv head, window included (the paper's max
            capacity prompt). A float is a share of each row's prompt, of which no layer retains more than all.
        window: the number of most recent tokens whose queries score, and which are always retained.
        kernel: the odd size of the pooling along the prompt, in tokens.
        pool: "max", "avg" or "none".
        group: how scores are reduced over the query heads of a kv head.
        beta: the steepness; 1 is SnapKV.
        formula: "paper" gives each layer its slots whatever the prompt's length. "code" is as released, where short
            prompts lose less, and "kvpress" as ported by kvpress; both depend on the prompt's length, and slots are
            those of the worst length. See `Pyramid`.

    Raises:
        ValueError: for a value that is not accepted, or a budget of no more than the window.
    """
    policy = snapkv(budget, window=window, kernel=kernel, pool=pool, group=group)
    return replace(policy, budget=Pyramid(budget_of(budget), window, beta, formula))

"""PyramidKV (Cai et al., arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvjax.parts import Pyramid, budget_of
from kvjax.policy import Policy

from .snapkv import snapkv


def pyramidkv(
    budget: int | float = 1024,
    window: int = 8,
    kernel: int = 7,
    pool: Literal["max", "avg", "none"] = "max",
    group: Literal["mean", "max"] = "mean",
    beta: int = 20,
    formula: Literal["paper", "code", "kvpress"] = "paper",
) -> Policy:
    """SnapKV with budgets that fall from layer to layer: attention gathers on fewer tokens the deeper the layer.

    Layer l of L keeps window + high - l * step entries, where b = budget - window, low = floor(b / beta),
    high = 2 b - low and step = floor((high - low) / (L - 1)): the mean over layers is the budget, but for rounding.
    A model of one layer keeps the budget; a layer that would keep no more than its window keeps one entry beside it.

    Args:
        budget: entries kept of the prompt in the mean over layers, window included (the paper's max capacity prompt);
            a float is that share of each row's prompt, of which no layer keeps more than all.
        window: the observation window, always kept.
        kernel: pooling size along the prompt.
        pool: "max", "avg" or "none".
        group: how the query heads of a kv head are reduced.
        beta: the steepness; 1 is SnapKV.
        formula: "paper" gives each layer its slots whatever the prompt, and so saves what it says. "code" is as
            released, where short prompts are cut less, and "kvpress" as ported; both depend on the prompt's length, and
            slots are those of the worst one. See `Pyramid`.
    """
    policy = snapkv(budget, window=window, kernel=kernel, pool=pool, group=group)
    return replace(policy, budget=Pyramid(budget_of(budget), window, beta, formula))

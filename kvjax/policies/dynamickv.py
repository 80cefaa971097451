"""DynamicKV (Zhou et al., EMNLP 2025, arXiv 2412.14838): SnapKV with budgets that follow the prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvjax.parts import DynamicShares, budget_of
from kvjax.policy import Policy

from .snapkv import snapkv


def dynamickv(
    budget: int | float = 1024,
    window: int = 8,
    kernel: int = 7,
    pool: Literal["max", "avg", "none"] = "avg",
    group: Literal["mean", "max"] = "mean",
    interval: int = 4,
    r_max: float = 10.0,
    code_rounding: bool = False,
) -> Policy:
    """Compresses the prompt once, as SnapKV, each layer to as much as its scores are among the best; the answer on top.

    With b = budget - window: after every m layers the b * H * n best scores of the n layers so far are counted, and
    layer i is given Z_i = b * L * cnt_i / sum(cnt). It keeps the least of what it was ever given, at most r_max * b,
    and the window, in every head (Algorithm 1). The paper's normalisations of the counts cancel in Z.

    Args:
        budget: entries of the mean layer, window included (the paper's wt); a float is that share of each row's prompt.
            Layers may keep fewer in all, never more.
        window: ws, the observation window, always kept.
        kernel: pooling size along the prompt.
        pool: "avg" (released for Llama and InternLM), "max" (for Mistral and Qwen) or "none".
        group: how the query heads of a kv head are reduced, before pooling; the released code stores each of them.
        interval: m, layers between updates.
        r_max: no layer keeps more than r_max * b and the window. 5 is what the released script for Qwen comes to.
        code_rounding: rounds as released, which adds up to less; by largest remainders otherwise.
    """
    policy = snapkv(budget, window=window, kernel=kernel, pool=pool, group=group)
    return replace(policy, budget=DynamicShares(budget_of(budget), interval, r_max, code_rounding))

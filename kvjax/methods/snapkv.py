"""SnapKV (Li et al., arXiv 2404.14469): the attention of the last prompt tokens chooses what is retained of a prompt.

Differences from the paper and its code: entries are stored and chosen per kv head, where the released code repeats keys
for every query head first. Pooling follows the reduction over the query group; kvpress pools first, which is the same
for "avg" and differs for "max".
"""

from __future__ import annotations

from typing import Literal

from kvjax.pallas_kernels import Reduction
from kvjax.policy import Policy, Protect, check_choice

from .common.budgets import budget_of
from .common.pooling import Pooling
from .common.window_attention import WindowAttention
from .registry import preset


@preset
def snapkv(
    budget: int | float = 1024,
    window: int = 32,
    kernel: int = 7,
    pool: Literal["max", "avg", "none"] = "max",
    group: Literal["mean", "max"] = "mean",
) -> Policy:
    """Compresses the prompt once, by what its last `window` queries attended to. The answer is added to it.

    score[h, c] = pool over c (reduce over the query group of h (mean over window queries r of softmax(q_r . k)_c)),
    where the softmax is over all entries that r saw.

    Args:
        budget: the number of entries retained of the prompt, window included (the paper's max capacity prompt). An
            integer >= 1, or a float in (0, 1] for that share of each row's prompt.
        window: the size of the observation window in tokens. It is always retained.
        kernel: the size of the pooling along the prompt, odd.
        pool: "max" (the LongBench settings), "avg" (the default of the released code) or "none".
        group: the reduction over the query heads of a kv head.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than `window` + 1.
    """
    check_choice("pool", pool, "max", "avg", "none")
    check_choice("group", group, "mean", "max")
    return Policy(
        score=WindowAttention(
            window,
            reduction=Reduction(rows="mean", group=group),
            pooling=None if pool == "none" else Pooling(pool, kernel),
        ),
        budget=budget_of(budget),
        protect=Protect(recent=window),
    )

"""SnapKV (Li et al., arXiv 2404.14469): retains the prompt's entries that its last queries attend to.

Differences from the paper and its code:

- Entries are stored and chosen per kv head. The released code repeats keys for every query head first, and stores a
  copy per query head.
- Scores are reduced over the query group before they are pooled. kvpress pools first. The result is the same for
  `pool="avg"` with `group="mean"` and for `pool="max"` with `group="max"`.
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
    """Compresses the prompt once, by the attention that entries receive from the last `window` queries.

        score[h, c] = pool over c (reduce over the query group of h (mean over window queries r of softmax(q_r . k)_c))

    The softmax is over all entries that r saw. The answer is added to the retained entries.

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

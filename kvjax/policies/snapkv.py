"""SnapKV (Li et al., arXiv 2404.14469)."""

from __future__ import annotations

from typing import Literal

from kvjax.pallas_kernels import Reduction
from kvjax.parts import Drop, Pool, TopTokens, WindowAttention, budget_of
from kvjax.policy import Policy, Protect


def snapkv(
    budget: int | float = 1024,
    window: int = 32,
    kernel: int = 7,
    pool: Literal["max", "avg", "none"] = "max",
    group: Literal["mean", "max"] = "mean",
) -> Policy:
    """Compresses the prompt once, by what its last `window` queries attended to; the answer comes on top.

    score[h, c] = pool over positions (reduce over the group (mean over window rows r of softmax(q_r . k_c))), each row
    normalised over all it sees. The group is reduced before pooling: heads are stored per kv head.

    Args:
        budget: entries kept of the prompt, window included (the paper's max capacity prompt); a float is that share of
            each row's prompt.
        window: the observation window, always kept.
        kernel: pooling size along the prompt.
        pool: "max" (the LongBench settings), "avg" (the released default) or "none".
        group: how the query heads of a kv head are reduced.
    """
    if pool not in ("max", "avg", "none"):
        raise ValueError(f"pool={pool!r}: accepted are 'max', 'avg' and 'none'")
    return Policy(
        score=WindowAttention(
            window,
            reduction=Reduction(rows="mean", group=group),
            pool=None if pool == "none" else Pool(pool, kernel),
        ),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(recent=window),
    )

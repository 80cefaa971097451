"""MorphKV (Ghadia et al., ICML 2025, arXiv 2503.00979): a constant cache while decoding."""

from __future__ import annotations

from typing import Literal

from kvjax.pallas_kernels import Reduction
from kvjax.parts import DenseLayers, Drop, TopTokens, WindowAttention, WindowWeights, budget_of
from kvjax.policy import Budget, Policy, Protect


def morphkv(
    budget: int | float = 2048,
    window: int = 32,
    fusion: Literal["sum", "max"] = "sum",
    every: int = 1,
    dense_layers: int = 0,
    normalise: Literal["full", "distant"] = "full",
    group: Literal["sum", "max", "logits"] = "sum",
    state: Literal["queries", "weights"] = "queries",
) -> Policy:
    """Keeps the `window` newest tokens and, of the distant ones, those that the newest attended to most.

    F[h, c] = fuse over the last R queries r of (sum over the group of softmax(q_r . k_c)), and at every step the
    distant entry of the smallest F makes room for the token coming in (Algorithm 1, equations 4 to 7). Instead of R
    rows of weights the state is the last R queries and their log-sum-exp, from which exp(q_r . k_c - lse_r) is exactly
    the same weight, because keys do not change.

    Args:
        budget: what a query sees, itself included, C + R of the paper's Figure 5 (the released code's C + R + 1); a
            float is that share of each row's prompt.
        window: R, the newest tokens, always kept, whose queries vote.
        fusion: over the window: "sum" (equation 5) or "max" (equation 6).
        every: evict so many entries at a time (A.5); the occupancy swings between the budget and `every` - 1 below.
        dense_layers: the first so many layers keep everything (A.6, "layer-aware": 3).
        normalise: "full" is the paper's softmax over all a query saw; "distant" the released code's, over the distant
            entries alone.
        group: over the query group: "sum" of weights is the paper's. The released code has, both with "distant": the
            "max" of weights (Mistral, Qwen, Phi), and one softmax of the summed "logits" (Llama).
        state: "queries" as above, R G D numbers a kv head; "weights" keeps the R rows themselves, R numbers a slot, as
            the paper does: more memory and fewer operations, for machines without matrix units. The same scores.
    """
    if group not in ("sum", "max", "logits"):
        raise ValueError(f"group={group!r}: accepted are 'sum', 'max' and 'logits'")
    if state not in ("queries", "weights") or (state == "weights" and (normalise != "full" or group == "logits")):
        raise ValueError(
            f"state={state!r} with normalise={normalise!r}, group={group!r}: accepted are 'queries', and 'weights' "
            "with normalise='full' and group 'sum' or 'max', since stored weights cannot be normalised anew"
        )
    entries: Budget = budget_of(budget)
    reduction = Reduction(rows=fusion, group="max" if group == "max" else "sum", first="group")
    return Policy(
        score=WindowWeights(window, reduction)
        if state == "weights"
        else WindowAttention(window, reduction, normalise=normalise, sum_logits=group == "logits"),
        budget=DenseLayers(entries, dense_layers) if dense_layers else entries,
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(recent=window),
        every=every,
    )

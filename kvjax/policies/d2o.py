"""D2O, dynamic discriminative operations (Wan et al., arXiv 2406.13035): heavy hitters that take in what they lose."""

from __future__ import annotations

from typing import Literal

from kvjax.parts import SimilarityMerge, ThresholdAttention, TopTokens, VarianceShares, budget_of
from kvjax.policy import Policy, Protect


def d2o(
    budget: int | float = 0.2,
    sinks: int = 4,
    recent: int | float = 0.5,
    weights: Literal["paper", "code"] = "paper",
    alpha: float = 0.5,
    beta: float = 0.5,
    layer_budgets: bool = True,
    dense_first: int = 2,
    dense_last: int = 1,
    group: Literal["mean", "sum", "max"] = "mean",
    every: int | None = 1,
) -> Policy:
    """As `h2o`, with budgets by layer, and evicted entries merged into the kept ones that are most like them.

    A layer's share of a prompt falls with the variance of the attention that its tokens received (`VarianceShares`),
    clamp(softmax(-x) * L * rho, 0.01, 1). An evicted entry goes into the kept one with the most similar key, u being
    their cosine after RoPE, if the mean of u over the heads reaches a threshold that moves with u, and is dropped
    otherwise (`SimilarityMerge`):

        k* = (e k_c + sum exp(u_i) k_i) / (e + sum exp(u_i)), values alike
        tau = alpha * tau + beta * mean of u

    A prompt is compressed at its end; the released code does so after one more token.

    Args:
        budget: entries that the mean of the compressed layers keeps, all included, and with `layer_budgets=False` each
            layer; a float is that share of each row's prompt.
        sinks: the first tokens, always kept.
        recent: tokens kept for being recent; a float is that share of what a layer keeps (the released code: half).
        weights: "code" is the released (k_c + sum u_i k_i) / (1 + n), which shrinks keys and values.
        alpha: of the old threshold.
        beta: of the mean of u.
        layer_budgets: False gives the same to all layers and compresses all of them.
        dense_first: with layer budgets, so many of the first layers keep everything, prompt and answer.
        dense_last: likewise of the last ones.
        group: how the query heads of a kv head are reduced.
        every: evict so many tokens at a time; None compresses the prompt only.
    """
    entries = budget_of(budget)
    return Policy(
        score=ThresholdAttention(group),
        budget=VarianceShares(entries, dense_first, dense_last) if layer_budgets else entries,
        select=TopTokens(),
        merge=SimilarityMerge(weights, alpha, beta),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )

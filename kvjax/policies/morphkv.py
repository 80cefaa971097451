"""MorphKV (Ghadia et al., ICML 2025, arXiv 2503.00979): a constant cache while decoding."""

from __future__ import annotations

from typing import Literal

from kvjax.pallas_kernels import Reduction
from kvjax.parts import DenseLayers, Drop, FoldedWindow, TopTokens, WindowAttention, budget_of
from kvjax.policy import Policy, Protect
from kvjax.protocols import Budget, Score, check_integer


def morphkv(
    budget: int | float = 2048,
    window: int = 32,
    fusion: Literal["sum", "max"] = "sum",
    every: int | None = 1,
    dense_layers: int = 0,
    normalise: Literal["full", "distant"] = "full",
    group: Literal["sum", "max", "logits"] = "sum",
    block: int | None = None,
) -> Policy:
    """Keeps the `window` newest tokens and, of the distant ones, those that the newest attended to most.

    F[h, c] = fuse over the last R queries r of (sum over the group of softmax(q_r . k_c)), and at every step the
    distant entry of the smallest F makes room for the token coming in (Algorithm 1, equations 4 to 7). Instead of R
    rows of weights the state is what each slot received from blocks of them, fused, and the last R queries with their
    log-sum-exp: exp(q_r . k_c - lse_r) is exactly the weight that the paper keeps, because keys do not change, and has
    to be computed again for the block only that is leaving the window: where each step evicts, in the pass over keys
    in which the step before attends.

    Args:
        budget: what a query sees, itself included, C + R of the paper's Figure 5 (the released code's C + R + 1); a
            float is that share of each row's prompt.
        window: R, the newest tokens, always kept, whose queries vote.
        fusion: over the window: "sum" (equation 5) or "max" (equation 6).
        every: evict so many entries at a time (A.5); the occupancy swings between the budget and `every` - 1 below.
            None compresses the prompt only.
        dense_layers: the first so many layers keep everything (A.6, "layer-aware": 3).
        normalise: "full" is the paper's softmax over all a query saw; "distant" the released code's, over the distant
            entries alone.
        group: over the query group: "sum" of weights is the paper's. The released code has, both with "distant": the
            "max" of weights (Mistral, Qwen, Phi), and one softmax of the summed "logits" (Llama).
        block: queries whose weights are fused into one number a slot, a divisor of the window; by default the smallest
            that makes it 8 numbers a slot or fewer. 1 keeps every weight, as the paper does, R numbers a slot. Scores
            are the same for all.
    """
    if group not in ("sum", "max", "logits"):
        raise ValueError(f"group={group!r}: accepted are 'sum', 'max' and 'logits'")
    check_integer("window", window, least=1)
    reduction = Reduction(rows=fusion, group="max" if group == "max" else "sum", first="group")
    score: Score
    if normalise == "full" and group != "logits":
        smallest = next(n for n in range(1, window + 1) if window % n == 0 and window <= 8 * n)
        size = smallest if block is None else block
        score = FoldedWindow(window, size, reduction, ahead=every == 1 and size != 1)
    elif block is None:
        score = WindowAttention(window, reduction, normalise=normalise, sum_logits=group == "logits")
    else:
        raise ValueError(
            f"block={block} with normalise={normalise!r}, group={group!r}: accepted is None, since weights that have "
            "been fused cannot be normalised anew"
        )
    entries: Budget = budget_of(budget)
    return Policy(
        score=score,
        budget=DenseLayers(entries, dense_layers) if dense_layers else entries,
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(recent=window),
        every=every,
    )

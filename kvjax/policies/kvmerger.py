"""KVMerger (Wang et al., arXiv 2407.08454): similar neighbours merged, once the prompt has been read."""

from __future__ import annotations

from typing import Literal

from kvjax.parts import AccumulatedAttention, GaussianMerge, TopTokens, budget_of
from kvjax.policy import Policy, Protect


def kvmerger(
    budget: int | float = 0.5,
    recent: int | float = 0.34,
    heavy: int | float = 0.24,
    theta: float | None = 0.75,
    rule: Literal["anchor", "chain"] = "anchor",
    straddle: bool = False,
    sigma: Literal["mean", "rms", "eq7"] | float = "mean",
    weights: Literal["gauss", "average"] = "gauss",
    pivot: Literal["score", "random"] = "score",
    group: Literal["mean", "sum", "max"] = "mean",
    seed: int = 0,
    count_bias: bool = False,
) -> Policy:
    """Keeps recent tokens and heavy hitters as they are and merges runs of similar keys among the rest.

    a[h, c] = sum over all query rows of the prompt of the softmax weight on c (column sums; the paper's equation 6 sums
    a row, which is 1). The rest is scanned from its last token (Algorithm 1): a token joins the set if its key's cosine
    with the set's last one is above theta, both after RoPE, or begins another; the last open set counts too. Each set
    becomes one entry at its pivot p = argmax a, with g_i = exp(-|k_p - k_i|^2 / 2 sigma^2):

        k* = sum g_i k_i / sum g_i        v* = sum g_i v_i / sum g_i        (equations 7 to 9)

    A prompt within the budget is left as it is, and the answer comes on top. A merged entry keeps its pivot's position
    and weighs as one token (but for `count_bias`). If the cache is compressed again, it is merged as one token.

    Args:
        budget: entries kept of the prompt, all included; a float is that share of each row's prompt. The paper's are
            0.5 and 0.35.
        recent: tokens kept for being recent, a float as share of the budget. The paper's 17 % and 8 % of the prompt are
            0.34 of a budget of 0.5 and 0.229 of 0.35.
        heavy: tokens kept for the highest a, likewise; the paper's 12 % and 2 % are 0.24 and 0.057.
        theta: the threshold. It does not guarantee the budget: of more sets than fit, those with the lowest pivots
            in a are dropped; with fewer, slots stay empty. None finds each head's own, the largest that fits.
        rule: "anchor" is Algorithm 1; "chain" compares neighbours, as section 4.2 reads.
        straddle: lets sets reach across tokens that are kept (Algorithm 1's compacted list), instead of breaking them
            there (Definition 5.1, "consecutive").
        sigma: "mean" distance between the pivot and the others of a set (section 6.3); "eq7", sum of square distances /
            (sqrt 2 |S|), which depends on the scale of keys; "rms", 2 sigma^2 = the mean square distance; or a number
            (Table 5: 1, 3, 6).
        weights: "average" is the ablation of Table 4.
        pivot: "random" is the ablation of Table 3, drawn from `seed`.
        group: how the query heads of a kv head are reduced.
        count_bias: adds ln n to the logits of an entry of n tokens, which the paper does not, so that merging equal
            keys does not change what others receive. A float32 a slot is kept.
    """
    return Policy(
        score=AccumulatedAttention(group),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=GaussianMerge(heavy, theta, rule, straddle, sigma, weights, pivot, seed, count_bias),
        protect=Protect(recent=recent),
    )

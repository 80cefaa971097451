"""D2O, dynamic discriminative operations (Wan et al., arXiv 2406.13035): merges evicted entries into heavy hitters.

The score, a mean over the query heads of a kv head, and the protected tokens are those of H2O. `variance_shares.py` has
the budgets of the layers, `similarity_merge.py` the merge.

Differences from the released code:

- Weights are e and exp(u), and add up to 1, as in the paper. `merge.weights="code"` is as released: (k + sum u_i k_i) /
  (1 + n), which shrinks keys and values.
- The budget is the mean of the compressed layers, and their shares add up to it or less. The released code takes the
  softmax over all layers, uncompressed ones included.
- The prompt is compressed at its end. The released code compresses it after one more token.
- Each kv head has one variance, over all tokens of the prompt, and each row its own threshold. The released code has
  variances per query head, and takes one row at a time.
- Entries are stored per kv head. The released code stores keys and values per query head.
"""

from __future__ import annotations

from kvjax.checks import check_truth
from kvjax.policy import Policy, Protect

from ..common.accumulated import AccumulatedAttention
from ..common.budgets import budget_of
from ..registry import preset
from .similarity_merge import SimilarityMerge
from .variance_shares import VarianceShares

MERGE = SimilarityMerge()


@preset
def d2o(
    budget: int | float = 0.2,
    sinks: int = 4,
    recent: int | float = 0.5,
    layer_budgets: bool = True,
    dense_first: int = 2,
    dense_last: int = 1,
    every: int | None = 1,
    merge: SimilarityMerge = MERGE,
) -> Policy:
    """Retains what `h2o` does, with budgets by layer, and merges evicted entries into the most similar retained ones.

        score[h, c] = sum over all queries r so far of softmax(q_r . k)_c, mean over the query group of h
        share of layer l = clamp(softmax(-x)_l * L * rho, 0.01, 1),    x_l = variance of the attention on its tokens
        k* = (e k_c + sum exp(u_i) k_i) / (e + sum exp(u_i)),    values alike
        tau = alpha * tau + beta * mean of u

    u is the cosine of an evicted key and the most similar retained key, both after RoPE. An evicted entry is merged if
    the mean of u over the heads reaches the threshold tau, and is dropped otherwise. `VarianceShares` computes the
    shares, `SimilarityMerge` the merge.

    Args:
        budget: the number of entries that the mean of the compressed layers retains, all included; with
            `layer_budgets=False` each layer retains it. An integer >= 1, or a float in (0, 1] for that share of each
            row's prompt.
        sinks: the number of first tokens, which are always retained.
        recent: the number of most recent tokens that are retained, or a float in [0, 1) for that share of what a layer
            retains (the released code: half).
        layer_budgets: False gives all layers the same budget and compresses all of them.
        dense_first: with layer budgets, the number of first layers that retain everything, prompt and answer.
        dense_last: the same for the last layers.
        every: the number of entries that a full head evicts at a time; None compresses the prompt only.
        merge: the weights of merged entries and the threshold. Its options are those of `SimilarityMerge`, as text
            `merge.weights`, `merge.alpha` and `merge.beta`.

    Raises:
        ValueError: for a value that is not accepted, a budget smaller than sinks + recent + `every`, or, once a model
            is known, fewer than `dense_first` + `dense_last` + 1 layers.
    """
    check_truth("layer_budgets", layer_budgets)
    entries = budget_of(budget)
    return Policy(
        score=AccumulatedAttention(),
        budget=VarianceShares(entries, dense_first, dense_last) if layer_budgets else entries,
        merge=merge,
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )

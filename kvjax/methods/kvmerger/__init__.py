"""KVMerger (Wang et al., arXiv 2407.08454): merges sets of similar neighbouring entries into one entry each.

`cluster.py` finds the sets (Algorithm 1), `gaussian_merge.py` merges them (Algorithm 2).

Differences from the paper, whose statements contradict each other in places:

- Importance is the column sum of attention. Equation 6 sums a row of the attention matrix, which is 1 for every token.
- The last open set of Algorithm 1 counts too. The algorithm never closes it.
- Sets end at tokens that are retained unmerged (Definition 5.1), and a key is compared with the set's last token
  (Algorithm 1). `merge.straddle=True` lets sets continue behind such tokens. `merge.rule="chain"` compares neighbours
  (section 4.2).
- Sigma is the mean distance to the pivot (section 6.3), so the scale of keys does not matter. `merge.sigma="eq7"` is
  equation 7, which depends on the scale; `merge.sigma="rms"` and a number (Table 5) are other choices.
- 17 % and 12 % of the prompt are retained unmerged as recent and heavy tokens, where the paper writes 0.17 % and 0.12
  %.
- theta = 0.75 does not guarantee the budget. If there are more sets, those with the least attention are dropped. If
  there are fewer, slots stay empty. `merge.theta=None` solves for the threshold that fills the budget.
- A merged entry weighs as one token: two equal keys and another, of a third each, become halves.
  `merge.count_bias=True` adds ln n to the logits of an entry of n tokens, so equal keys keep their two thirds.
- The paper does not say when it merges while decoding; its Table 2 gives a cache of constant size and no schedule. Here
  `every=None` merges the prompt only, and `every=n` merges whenever a head is full, so that its size never exceeds the
  budget.
"""

from __future__ import annotations

from typing import Literal

from kvjax.policy import Policy, Protect

from ..common.accumulated import AccumulatedAttention
from ..common.budgets import budget_of
from ..registry import preset
from .gaussian_merge import GaussianMerge

MERGE = GaussianMerge()


@preset
def kvmerger(
    budget: int | float = 0.5,
    recent: int | float = 0.34,
    group: Literal["mean", "sum", "max"] = "mean",
    every: int | None = None,
    merge: GaussianMerge = MERGE,
) -> Policy:
    """Retains recent tokens and heavy hitters unmerged, and merges runs of similar keys among the others.

    The sum a of softmax weights over all queries decides which tokens are heavy hitters. The other tokens are scanned
    from the last one (Algorithm 1): a token joins the set if the cosine of its key and the key of the set's last token
    is above theta, both after RoPE, and begins another set if not. Each set becomes one entry at its pivot p:

        a[h, c] = sum over all queries r of softmax(q_r . k)_c,    p = argmax of a over the set
        g_i = exp(-|k_p - k_i|^2 / 2 sigma^2)
        k* = sum g_i k_i / sum g_i,    v* = sum g_i v_i / sum g_i        (equations 7 to 9)

    A prompt within the budget is left as it is. A merged entry keeps the position and the score of its pivot and weighs
    as one token (but see `merge.count_bias`). Later merges count it as one token.

    Variants, as text:

    - `kvmerger:every=32` merges while decoding: a full head merges its entries down to 32 below its budget.
    - `kvmerger:merge.theta=None` fills the budget: each head solves for the largest threshold that meets it.

    Args:
        budget: the number of entries retained of the prompt per kv head, all included. An integer >= 1, or a float in
            (0, 1] for that share of each row's prompt. The paper's are 0.5 and 0.35.
        recent: the number of most recent tokens that are retained unmerged, or a float in [0, 1) for that share of the
            budget. The paper's 17 % and 8 % of the prompt are 0.34 of a budget of 0.5 and 0.229 of 0.35.
        group: the reduction over the query heads of a kv head.
        every: merges while decoding as well: a full head merges its entries down to `every` fewer than its budget, or
            further if more sets are similar. The budget then bounds what a query sees. None merges the prompt only.
        merge: the number of heavy hitters, how sets are found and how they are merged. Its options are those of
            `GaussianMerge`, as text `merge.heavy`, `merge.theta` and so on; its defaults are the paper's.

    Raises:
        ValueError: for a value that is not accepted, or if `merge.heavy` + `recent` + `every` leave nothing to merge
            into.
    """
    return Policy(
        score=AccumulatedAttention(group),
        budget=budget_of(budget),
        merge=merge,
        protect=Protect(recent=recent),
        every=every,
    )

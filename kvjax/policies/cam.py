"""CaM, cache merging (Zhang et al., ICML 2024): sinks and recent tokens, whose values take in those that leave."""

from __future__ import annotations

from typing import Literal

from kvjax.parts import TopTokens, ValueMerge, WatchedRecency, budget_of
from kvjax.policy import Policy, Protect


def cam(
    budget: int | float = 1024,
    sinks: int = 4,
    tokens: int = 32,
    form: Literal["bernoulli", "expected"] = "bernoulli",
    group: Literal["mean", "sum", "max"] = "mean",
    every: int = 1,
    seed: int = 0,
) -> Policy:
    """The first and the newest tokens, as `streaming_llm`; a token that leaves while decoding hands its value on.

    With A the attention received from all queries so far, token i is merged with probability
    p = clamp(A_i / mean(A_{i+1..i+m}), 0, 1), and then v_j += v_i / m for the next m kept tokens j. Keys are dropped.
    What the prompt's compression leaves out is dropped as well.

    Args:
        budget: what a query sees, sinks and itself included; a float is that share of each row's prompt.
        sinks: the first tokens, always kept.
        tokens: m; the released code has 32 and 16. Where fewer follow, they share the value.
        form: "bernoulli" is the paper's draw; "expected" adds p v_i / m, without chance.
        group: how the query heads of a kv head are reduced in A.
        every: evict so many tokens at a time.
        seed: of the draws, which are functions of seed, layer, kv head and position.
    """
    return Policy(
        score=WatchedRecency(group),
        budget=budget_of(budget),
        select=TopTokens(),
        merge=ValueMerge(tokens, form, seed),
        protect=Protect(sinks=sinks),
        every=every,
    )

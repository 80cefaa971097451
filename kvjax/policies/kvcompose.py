"""KVCompose (arXiv 2509.05165): heads choose their own tokens, layers compete for how many."""

from __future__ import annotations

from typing import Literal

from kvjax.parts import CompositeShares, Drop, GlobalShares, TaskAttention, TopTokens, budget_of
from kvjax.policy import Policy
from kvjax.protocols import SharedBudget


def kvcompose(
    budget: int | float = 1024,
    source: Literal["replay", "self", "prompt"] = "replay",
    prompts: str | tuple[str | tuple[int, ...], ...] = "",
    rows: Literal["max", "mean", "sum"] = "max",
    group: Literal["mean", "max"] = "mean",
    head_mean: bool = True,
    value_norm: Literal["none", "v", "vo"] = "none",
    structured: bool = True,
    groups: int = 1,
    min_tokens: int = 0,
    first_layer: bool = False,
) -> Policy:
    """Compresses the prompt once, after all layers have read it, by what a task attends to; the answer comes on top.

    Without a task the prompt is its own: it is run a second time behind itself, at positions N .. 2N - 1, and

        S1[q, c] = max over its rows m of softmax(q_m . k)_c   (over all it sees; only the N entries c count; eq. 14)
        S2[h, c] = mean over the query group of S1, and S[h, c] = S2[h, c] + mean over kv heads of S2[., c]  (15, 16)

    Each head sorts its own S; the k-th best of a layer's heads are its composite k, whose importance is their mean, and
    the L * budget best composites of all layers are kept (eq. 17 to 24). A layer may be left with no entry at all, and
    a token to come then attends to itself alone there.

    Args:
        budget: entries of the mean kv head; a float is that share of each row's prompt, 1 - r of the paper, rounded
            down before it is multiplied by the layers.
        source: "replay" is the paper's task-agnostic form as released. "self" takes the first pass, which costs no
            second one. "prompt" runs the given task prompts (task-aware), each on its own behind the prompt.
        prompts: for source="prompt": a text, or several texts or tuples of token ids. Texts need `tokenizer=`.
        rows: over the task's rows, "max" (the paper's setting), "mean" of those that see the entry, or "sum".
        group: over the query group, after rows.
        head_mean: equation 16; without it S = S2.
        value_norm: S1 times the norm of the value, "v", or of what the query head's output projection makes of it, "vo"
            (A.1.3).
        structured: all heads of a layer keep as many. False: (layer, head) pairs compete with their S, and each really
            stores what it keeps, where kvpress masks.
        groups: for structured=False on a mesh: kv heads compete in so many groups, a multiple of the devices over which
            they are spread.
        min_tokens: no layer (no head, if not structured) keeps fewer; out of the same total.
        first_layer: as released, composites of the first layer count as the largest of their rank in any layer.
    """
    shares: SharedBudget
    if structured:
        if groups != 1:
            raise ValueError(f"groups={groups} with structured=True, where heads do not compete; accepted is 1")
        shares = CompositeShares(budget_of(budget), min_tokens, first_layer)
    else:
        if first_layer:
            raise ValueError("first_layer=True with structured=False, where no composites are made; accepted is False")
        shares = GlobalShares(budget_of(budget), groups, min_tokens)
    given = ((prompts,) if prompts else ()) if isinstance(prompts, str) else tuple(prompts)
    return Policy(
        score=TaskAttention(source, given, rows, group, head_mean, value_norm),
        budget=shares,
        select=TopTokens(),
        merge=Drop(),
    )

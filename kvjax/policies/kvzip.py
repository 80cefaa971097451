"""KVzip (Kim et al., arXiv 2505.23416)."""

from __future__ import annotations

from typing import Literal

from kvjax.parts import AdaptiveShares, Drop, GlobalShares, Reconstruction, TopTokens, UniformShares, budget_of
from kvjax.policy import Policy, Protect
from kvjax.protocols import SharedBudget


def kvzip(
    budget: int | float = 0.3,
    sinks: int = 4,
    level: Literal["global", "layer", "head"] = "global",
    chunk: int = 2048,
    instruction: str | tuple[int, ...] = Reconstruction.instruction,
    starting: str | tuple[int, ...] = Reconstruction.starting,
    suffix: str | tuple[int, ...] = Reconstruction.suffix,
    strict: bool = False,
    groups: int = 1,
) -> Policy:
    """Compresses the prompt by what is looked at when the model repeats it, whatever is asked later.

    After the prompt, each chunk of it is run once more behind "Repeat the previous context exactly.", over the whole
    cache and leaving nothing there. score[h, c] = the largest weight that any of these queries, of any head of the
    group, gave to entry c, in a softmax over the sinks, the chunk's entries and what was replayed so far (section 3).
    Reading takes two to three times as long, and all of the prompt's cache is there until it is shared out.

    Args:
        budget: entries of the mean kv head, sinks included; a float is that share of each row's prompt.
        sinks: the first tokens, always kept. As released it is the whole system prompt.
        level: who competes: all heads of all layers ("global"), the heads of each layer ("layer", kvpress's layerwise),
            or nobody: each head keeps its budget ("head", uniform as released).
        chunk: tokens that are repeated at a time.
        instruction: before the first chunk: text, which needs a tokenizer, or token ids. '' is nothing.
        starting: before the others; the 8 tokens that precede the chunk follow it.
        suffix: behind them, such as what the model's chat template puts before an answer.
        strict: as released, the score of the last entry that would fit is a threshold to be exceeded: one less is kept.
        groups: groups of consecutive kv heads that compete among themselves. On a mesh that spreads kv heads over D
            devices it must be a multiple of D; one device with as many groups keeps the same.
    """
    if level not in ("global", "layer", "head"):
        raise ValueError(f"level={level!r}: accepted are 'global', 'layer' and 'head'")
    if strict and level != "global":
        raise ValueError(f"strict=True with level={level!r}: accepted with it is level='global'")
    if groups != 1 and level == "head":
        raise ValueError(f"groups={groups} with level='head', where no heads compete; accepted with it is groups=1")
    entries = budget_of(budget)
    shared: SharedBudget = UniformShares(entries)
    if level == "global":
        shared = GlobalShares(entries, groups, strict=strict)
    elif level == "layer":
        shared = AdaptiveShares(entries, alpha=0.0, normalise=False, groups=groups)
    return Policy(
        score=Reconstruction(sinks, chunk, instruction, starting, suffix),
        budget=shared,
        select=TopTokens(),
        merge=Drop(),
        protect=Protect(sinks=sinks),
    )

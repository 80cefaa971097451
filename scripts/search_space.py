"""The parts that `search_policy.py` combines, and where each search starts.

A change is a function from a policy to another one, which differs in one part. It raises ValueError if the part does
not suit the policy, and returns None if the policy has nothing that it could change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from benchmarks.measure_language import POLICIES
from kvjax import Policy, Storage, policies
from kvjax.parts import (
    AdaptiveShares,
    Chunks,
    Drop,
    DynamicShares,
    FittedEntries,
    Fixed,
    Fraction,
    GaussianMerge,
    GlobalShares,
    Pooling,
    ProjectedValues,
    Protect,
    Pyramid,
    Quantized,
    QuerySample,
    Representatives,
    SimilarityMerge,
    TopTokens,
    ValueMerge,
    WindowAttention,
)

Change: TypeAlias = Callable[[Policy], Policy | None]
Budget: TypeAlias = int | float

# Presets that read gates or statistics of one model.
ATTACHED = ("kvzap", "fastkvzip", "lookaheadkv", "restorekv", "qfilter", "expected_attention_stats", "triattention")
UNINSTRUCTED = ",score.instruction='',score.starting='',score.suffix=''"
LEFT_OUT = ("simlayerkv", "fastgen", "dms", "quantize", "think", "zipcache", "headkv", "lukv", "per_layer")


@dataclass(frozen=True)
class Space:
    """A search.

    Attributes:
        start: the policy that it starts from.
        parts: the changes by part and name. The parts are tried in this order.
        presets: published policies that the result is compared with, in their papers' settings.
    """

    start: Policy
    parts: Mapping[str, Mapping[str, Change]]
    presets: tuple[str, ...]


def of_prompts(budget: Budget, instructed: bool = True) -> Space:
    """Policies that compress a prompt once: for questions that the policy sees, and for questions that follow.

    Args:
        budget: of each policy.
        instructed: whether the model understands the instruction to repeat a text.
    """
    presets = _compressing(budget, instructed)
    parts: dict[str, dict[str, Change]] = {
        "pooling": {
            "none": _pooling(None),
            **{f"{kind} of {n}": _pooling(Pooling(kind, n)) for kind in ("max", "avg") for n in (7, 15, 31, 63)},
        },
        "window": {str(n): _window(n) for n in (8, 16, 32, 64)},
        "mean or maximum": {
            f"{rows} of queries, {group} of group": _reduction(rows, group)
            for rows in ("mean", "max")
            for group in ("mean", "max")
        },
        "score": {name: _scored_as(policy) for name, policy in _prompt_scores(presets).items()},
        "sinks": {str(n): _protected(sinks=n) for n in (0, 4, 16)},
        "recent": {str(n): _behind(n) for n in (0, 8, 32)},
        "values": {"norms of projected values": _projected, "none": _unprojected},
        "budget": {
            "alike": lambda policy: replace(policy, budget=_size(policy)),
            "pyramid": lambda policy: replace(policy, budget=Pyramid(_size(policy), 8)),
            "heads by score": lambda policy: replace(policy, budget=AdaptiveShares(_size(policy))),
            "layers by score": lambda policy: replace(policy, budget=DynamicShares(_size(policy))),
            "all heads by score": lambda policy: replace(policy, budget=GlobalShares(_size(policy))),
        },
        "select": {
            "tokens": lambda policy: replace(policy, select=TopTokens()),
            "chunks of 10": lambda policy: replace(policy, select=Chunks(TopTokens(), 10)),
            "chunks of 20": lambda policy: replace(policy, select=Chunks(TopTokens(), 20)),
            "representatives": lambda policy: replace(policy, select=Representatives(TopTokens(), 0.25)),
        },
        "merge": {
            "none": _unmerged,
            "Gaussian": lambda policy: replace(_unmerged(policy), merge=GaussianMerge()),
            "by similarity": lambda policy: replace(_unmerged(policy), merge=SimilarityMerge()),
            "fitted": _fitted,
        },
        "storage": _storages(budget),
    }
    return Space(policies.snapkv(budget), parts, presets)


def of_answers(budget: int) -> Space:
    """Policies that evict while decoding, so that the cache has a constant size."""
    parts: dict[str, dict[str, Change]] = {
        "score": {name: _scored_as(policy) for name, policy in _decode_scores(budget).items()},
        "sinks": {str(n): _protected(sinks=n) for n in (0, 4, 16)},
        "recent": {str(n): _protected(recent=n) for n in (0, 8, 32, 64, 0.25, 0.5)},
        "every": {str(n): _every(n) for n in (1, 8, 32)},
        "select": {
            "tokens": lambda policy: replace(policy, select=TopTokens()),
            "representatives": lambda policy: replace(policy, select=Representatives(TopTokens(), 0.25)),
        },
        "merge": {
            "none": _unmerged,
            "Gaussian": lambda policy: replace(_unmerged(policy), merge=GaussianMerge()),
            "by similarity": lambda policy: replace(_unmerged(policy), merge=SimilarityMerge()),
            "values": lambda policy: replace(_unmerged(policy), merge=ValueMerge()),
        },
        "storage": _storages(budget),
    }
    return Space(policies.streaming_llm(budget), parts, _decoding(budget))


def size(policy: Policy) -> Budget:
    """The budget of a policy as a number: a share of the prompt, or a number of entries."""
    budget = _size(policy)
    return budget.entries if isinstance(budget, Fixed) else budget.share


def _size(policy: Policy) -> Fixed | Fraction:
    found: Any = policy.budget
    while not isinstance(found, Fixed | Fraction):
        found = found.budget
    return found


def _prompt_scores(presets: tuple[str, ...]) -> dict[str, Policy]:
    """The scores of presets, those of presets with a base left out; and some that evict while decoding."""
    alone = {text.partition(":")[0]: policies.parse(text) for text in presets if "base=" not in text}
    budget = size(alone["snapkv"])
    return alone | {name: policies.PRESETS[name](budget) for name in ("h2o", "tova", "rkv")}


def _decode_scores(budget: int) -> dict[str, Policy]:
    texts = (*_decoding(budget), *(f"morphkv:budget={budget},window={n}" for n in (8, 16, 64)))
    return {text: policies.parse(text) for text in texts}


def _decoding(budget: int) -> tuple[str, ...]:
    """The presets that evict while decoding, with the settings of `measure_language.py`.

    D2O's own budgets let some layers retain everything, which would be no cache of the same size.
    """
    alike = {"d2o:budget={budget}": "d2o:budget={budget},layer_budgets=False"}
    return tuple(alike.get(text, text).format(budget=budget) for text in POLICIES if "{budget}" in text)


def _compressing(budget: Budget, instructed: bool) -> tuple[str, ...]:
    """The presets that compress a prompt once, with their papers' settings; those with a base have SnapKV as theirs."""
    found = []
    for name in (name for name in policies.PRESETS if name not in ATTACHED):
        options = UNINSTRUCTED if name in ("kvzip", "kvgrad") and not instructed else ""
        for text in (f"{name}:budget={budget}{options}", f"{name}:base=snapkv,base.budget={budget}"):
            try:
                policy = policies.parse(text)
            except ValueError:  # the preset has no such option, or the budget is smaller than its window
                continue
            if policy.every is None and name not in LEFT_OUT:
                found.append(text)
                break
    return tuple(found)


def _scored_as(other: Policy) -> Change:
    """The score of another policy and the tokens that it protects; its budget as well if that is an allocated one."""

    def change(policy: Policy) -> Policy:
        budget = other.budget if other.allocates else policy.budget
        return replace(_unmerged(policy), score=other.score, protect=other.protect, budget=budget)

    return change


def _attention(policy: Policy) -> WindowAttention | None:
    score: Any = policy.score
    while not isinstance(score, WindowAttention) and hasattr(score, "base"):
        score = score.base
    return score if isinstance(score, WindowAttention) else None


def _with_attention(score: Any, new: WindowAttention) -> Any:
    return new if isinstance(score, WindowAttention) else replace(score, base=_with_attention(score.base, new))


def _changed(change: Callable[[WindowAttention], WindowAttention]) -> Change:
    def changed(policy: Policy) -> Policy | None:
        attention = _attention(policy)
        if attention is None:
            return None
        new = change(attention)
        return replace(
            policy, score=_with_attention(policy.score, new), protect=replace(policy.protect, recent=new.window)
        )

    return changed


def _window(tokens: int) -> Change:
    return _changed(lambda attention: replace(attention, window=tokens))


def _pooling(pooling: Pooling | None) -> Change:
    return _changed(lambda attention: replace(attention, pooling=pooling))


def _reduction(rows: Any, group: Any) -> Change:
    return _changed(
        lambda attention: replace(attention, reduction=replace(attention.reduction, rows=rows, group=group))
    )


def _projected(policy: Policy) -> Policy | None:
    return None if isinstance(policy.score, ProjectedValues) else replace(policy, score=ProjectedValues(policy.score))


def _unprojected(policy: Policy) -> Policy | None:
    return replace(policy, score=policy.score.base) if isinstance(policy.score, ProjectedValues) else None


def _unmerged(policy: Policy) -> Policy:
    score = policy.score.base if isinstance(policy.score, QuerySample) else policy.score
    return replace(policy, score=score, merge=Drop())


def _fitted(policy: Policy) -> Policy:
    return replace(policy, score=QuerySample(_unmerged(policy).score), merge=FittedEntries())


def _protected(**tokens: int | float) -> Change:
    return lambda policy: replace(policy, protect=Protect(**{**vars(policy.protect), **tokens}))


def _behind(tokens: int) -> Change:
    """Protects the newest tokens, unless a window does."""

    def change(policy: Policy) -> Policy | None:
        return _protected(recent=tokens)(policy) if _attention(policy) is None else None

    return change


def _every(tokens: int) -> Change:
    return lambda policy: replace(policy, every=tokens)


def _storages(budget: Budget) -> dict[str, Change]:
    """8 and 4 bits take half and a quarter of bfloat16's bytes, and scales: the same bytes hold more entries."""

    def stored(storage: Storage, bits: float) -> Change:
        more = 16 / bits
        entries = int(budget * more) if isinstance(budget, int) else min(1.0, round(budget * more, 4))
        return lambda policy: replace(policy, budget=_resized(policy.budget, entries), storage=storage)

    scale = 16 / 32  # a bfloat16 scale for 32 channels
    found = {f"{bits} bits, more entries": stored(Quantized(bits), bits + scale) for bits in (8, 4)}
    return {"as it is": stored(Storage(), 16), **found}


def _resized(budget: Any, entries: Budget) -> Any:
    if isinstance(budget, Fixed | Fraction):
        return Fixed(entries) if isinstance(entries, int) else Fraction(entries)
    return replace(budget, budget=_resized(budget.budget, entries))

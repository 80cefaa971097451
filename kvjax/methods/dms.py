"""DMS's threshold (Lancucki et al., arXiv 2506.05345), as kvpress's DMSPress: evicts entries that score too low.

Differences from the paper:

- The threshold applies to any score, once the prompt has been read, as in kvpress. The paper trains evictors into the
  model, and evicts while it reads.

Differences from kvpress:

- Each head stores what it retains. kvpress masks entries and stores them all.
- `budget` bounds the total, because the memory of a compiled program is fixed before the prompt is read. With
  budget=1.0 the threshold alone decides, and the cache has room for the whole prompt. With less, the threshold rises
  until the total fits.
- Only the prompt is compared with the threshold. With `decoding=True` kvpress compares each generated token when it
  leaves the window, with a score that saw this token alone.
- The default threshold, for the scores of KeyDiff, is that of kvjax. kvpress has none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.mesh.heads import Heads
from kvjax.policy import AllocatedBudget, Layout, Policy, check_integer, check_kind, check_number

from .common.allocation import check_mean, raise_best
from .common.budgets import budget_of
from .common.refusals import check_plain_budget
from .common.shares import GlobalShares
from .keydiff import keydiff
from .registry import preset

KEYDIFF = keydiff()


@dataclass(frozen=True)
class ThresholdShares(AllocatedBudget):
    """The entries that score `threshold` or more are retained, and of these a row's best if they exceed the total.

    On a mesh nothing is communicated, because a group of heads lies on one device.

    Attributes:
        budget: entries of the mean kv head, the same for all layers.
        threshold: on the scale of the scores. Protected entries stay whatever they score.
        groups: the number of groups of consecutive kv heads, each of which has its own total. The number of devices
            that kv heads are divided over must divide it.

    Raises:
        ValueError: for a value that is not accepted, or a budget that is not the same for all layers.
    """

    threshold: float
    groups: int = 1

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, "a finite number", lambda x: True)
        check_integer("groups", self.groups, least=1)
        check_mean(self.budget)

    def check(self, policy: Policy) -> None:
        if policy.select.compares != "scores":
            raise ValueError(
                f"it compares single entries with a threshold, and the selection {type(policy.select).__name__} does "
                "not retain the highest scores one by one; they cannot be combined"
            )

    @property
    def layout(self) -> Layout:
        return Layout(groups=self.groups)

    def allocate(
        self, scores: Float[Array, "L B H M"], means: Int[Array, "L B"], least: int, heads: Heads
    ) -> Int[Array, "L B H"]:
        L, B, H, M = scores.shape
        ordered = raise_best(scores.reshape(L * B, H, M), least).reshape(scores.shape)
        enough = jnp.where(ordered >= self.threshold, ordered, -jnp.inf)
        return GlobalShares(self.budget, self.groups).allocate(enough, means, least, heads)


@preset
def dms(
    base: Policy = KEYDIFF, threshold: float = -0.5, window: int = 128, budget: int | float = 1.0, groups: int = 1
) -> Policy:
    """Evicts the entries of the prompt that score below a threshold, in each head as many as there are.

        head h retains {c : score[h, c] >= threshold} and the newest `window` tokens

    Heads are compressed also if the prompt is within the budget. Decoding is the base's own: the answer is added, or
    each head evicts within its number.

    Args:
        base: the policy that scores and protects, and selects entries one by one. Its budget, which is a number of
            entries or a share of the prompt, is not used.
        threshold: on the scale of the base's scores, which depends on the score and often on the model and the length
            of the prompt; kvpress has no default. The default of KeyDiff lets a key go whose cosine with the mean key
            is above 0.5.
        window: the number of newest tokens, which are always retained (kvpress: 128); more if the base protects a
            larger number. A share of its budget that the base protects is not used.
        budget: the most entries that the mean kv head retains; the threshold rises until it is met. An integer >= 1, or
            a float in (0, 1] for that share of each row's prompt; 1.0 leaves it to the threshold.
        groups: the number of groups of consecutive kv heads that share a total. On a mesh that divides kv heads over D
            devices it must be a multiple of D.

    Raises:
        ValueError: for a value that is not accepted, an integer budget smaller than the protected entries + 1, and for
            a base whose heads must retain the same tokens, whose method is its budget, or whose selection is not by
            scores alone.
    """
    check_kind("base", base, Policy)
    check_plain_budget(base)
    check_integer("window", window, least=0)
    recent = base.protect.recent
    protect = replace(base.protect, recent=window if isinstance(recent, float) else max(window, recent))
    return replace(base, budget=ThresholdShares(budget_of(budget), threshold, groups), protect=protect)

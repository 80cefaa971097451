"""Rising budgets (no paper; kvpress's CompressionRatioDecodingPress): a share of all tokens seen, prompt and answer.

Differences from kvpress:

- The share holds at every step: a head makes room before a token comes in. kvpress evicts once in so many steps and
  holds the tokens of these steps in full.
- The prompt is compressed to the share as well. kvpress leaves the prompt to another press.
- A share is rounded down as everywhere here: 0.1 of 10 tokens is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction as Ratio

from jaxtyping import Array, Int

from kvjax.policy import Budget, Policy, check_integer, check_kind, check_share_of, ratio_of, share_of

from .common.refusals import check_plain_budget
from .h2o import h2o
from .registry import preset

H2O = h2o()


@dataclass(frozen=True)
class SeenShare(Budget):
    """A share of the tokens that a row has had, rounded down: it rises while the answer grows.

    The slots are those of the longest answer that a call may give, so that shapes stay fixed.
    """

    share: float

    def __post_init__(self) -> None:
        check_share_of("share", self.share, "all tokens")

    @property
    def pace(self) -> Ratio:
        return ratio_of(self.share)

    def check(self, policy: Policy) -> None:
        if policy.every is None:
            raise ValueError("it is a share of the answer too: expected every=1 or more, so that decoding evicts")

    def capacity(self, layer: int, prompt_lengths: Int[Array, "B"], layers: int) -> Int[Array, "B"]:
        return share_of(self.share, prompt_lengths)


@preset
def rising(base: Policy = H2O, share: float = 0.5, every: int = 1) -> Policy:
    """Retains a share of all tokens seen, by another policy's scores, while the prompt is read and while decoding.

    After n tokens each kv head holds at most

        max(floor(share * n), protected entries + every)

    entries. The cache grows by `share` slots per token, where a budget of the prompt's share stays as it is.

    Args:
        base: the policy that scores, selects, merges and protects. Its budget, which is a number of entries or a share
            of the prompt, is not used.
        share: the share of all tokens, in (0, 1].
        every: the number of entries that a full head evicts at a time while decoding.

    Raises:
        ValueError: for a value that is not accepted, a base whose budget is part of its method, and a base that cannot
            evict while decoding.
    """
    check_kind("base", base, Policy)
    check_plain_budget(base)
    check_integer("every", every, least=1)
    return replace(base, budget=SeenShare(share), every=every)

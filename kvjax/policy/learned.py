"""Learned tokens behind a prompt, whose entries are cached beside what is retained of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .part import Part, check_integer, check_kind

if TYPE_CHECKING:
    from .policy import Policy


@dataclass(frozen=True)
class LearnedTokens(Part):
    """Learned tokens that run once behind a prompt, over its complete cache, and leave their entries.

    The tokens, and the adapters of the layers that run them, are gates beside the parameters (`kvjax.with_gates`). Each
    kv head of each layer gets an entry of each token. A row's budget pays for these entries: scores, which do not see
    them, decide about the rest of it. They take the positions behind the prompt, and the text that follows begins
    behind them. A row whose prompt fits into its budget has no learned tokens.

    Attributes:
        gates: the name of the gates.
        count: the number of tokens, the first of those that there are.

    Raises:
        ValueError: for a value that is not accepted, and, in a policy, for a budget that is not allocated or does not
            limit every layer, and for `every`.
    """

    gates: str
    count: int = 8

    def __post_init__(self) -> None:
        check_kind("gates", self.gates, str)
        check_integer("count", self.count, least=1)

    def check(self, policy: Policy) -> None:
        layout = policy.budget.layout
        if layout is None:
            raise ValueError(
                f"it runs over the complete prompt, and under {policy.budget} each layer is compressed before the next "
                "one reads it: expected a budget that is allocated, such as UniformShares"
            )
        if any(layout.dense) or layout.growing is not None:
            raise ValueError(f"a budget of {policy.budget}: expected one that limits every layer and head")
        if policy.every is not None:
            raise ValueError(
                f"its entries stay, and with every={policy.every} decoding would evict them: expected every=None"
            )

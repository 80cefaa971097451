"""Q-Filters (Godey et al., arXiv 2503.02812): projects keys on the main direction of their head's queries.

Differences from the paper and its code:

- All tokens compete, once per prompt, as in kvpress. The released cache retains a window of 64 recent tokens and evicts
  while decoding, which is `recent=64` and `every=1`.
- The sign of a filter is that of the paper, for which the mean product with queries is positive. The released script
  takes the sign of most products, from a sample of 3,000 queries.
- `kvjax measure-statistics` leaves out the first tokens of a text (`--sinks=0`: none).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.policy import Moment, Needs, Policy, Protect, Score

from .common.budgets import budget_of
from .common.refusals import check_own_positions
from .registry import preset


@dataclass(frozen=True)
class QueryFilter(Score):
    """The negative product of the key after RoPE with the filter of its kv head (`kvjax.with_statistics`)."""

    @property
    def needs(self) -> Needs:
        return Needs(slotwise=True, marks=frozenset({"signed"}), statistics=("q_filters",))

    def check(self, policy: Policy) -> None:
        check_own_positions(policy, "projects keys as they are rotated to their own positions")

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        assert moment.layer.statistics is not None
        filters = moment.layer.statistics["q_filters"]
        return -jnp.einsum("BHMD,HD->BHM", entries.keys.astype(jnp.float32), filters, precision="highest")


@preset
def qfilter(budget: int | float = 1024, sinks: int = 0, recent: int = 0, every: int | None = None) -> Policy:
    """Retains the entries whose keys point most against the filter of their head.

        score[h, c] = -(f_h . k_c)

    f_h is minus the mean over the query group of v, the principal right-singular vector of a query head's queries after
    RoPE on a set of texts, with the sign for which v . q is positive on average. The score is therefore proportional to
    the attention logit that such a query would have. It needs neither attention weights nor state.

    The filters are statistics beside the parameters: `kvjax.with_statistics(params, FOLDER)` reads those that `kvjax
    measure-statistics` writes or the authors published.

    Args:
        budget: the number of entries retained of the prompt per kv head. An integer >= 1, or a float in (0, 1] for
            that share of each row's prompt.
        sinks: the number of first tokens that are always retained.
        recent: the number of most recent tokens that are always retained (the released cache: 64; kvpress: 0).
        every: the number of entries that a full head evicts at a time while decoding; the budget then bounds what a
            query sees. None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or a budget smaller than sinks + recent + `every`. Parameters
            without these statistics are refused when a prompt is read.
    """
    return Policy(
        score=QueryFilter(),
        budget=budget_of(budget),
        protect=Protect(sinks=sinks, recent=recent),
        every=every,
    )

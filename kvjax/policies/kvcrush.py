"""KVCrush (Jha et al., ACML 2025, arXiv 2503.00022): representatives of what another policy leaves out of a prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvjax.parts import AccumulatedAttention, Representatives
from kvjax.policy import Policy

from .snapkv import snapkv

SNAPKV = snapkv(budget=2048)


def kvcrush(
    base: Policy = SNAPKV,
    share: float = 0.25,
    anchor: Literal["mean", "alternate", "random"] = "mean",
    pick: Literal["centroid", "grid", "kmeans"] = "centroid",
    upper: float = 0.5,
    seed: int = 0,
    granularity: Literal["token", "chunk", "page"] = "token",
    page: int = 32,
) -> Policy:
    """Gives a share of the base's budget to tokens that stand for those that the base would leave out of the prompt.

    b_t[h] = 1 if kv head h keeps token t or ranks it among the upper half of what it leaves out; d_t = the Hamming
    distance of b_t to an anchor. Tokens left out, sorted by (d_t, position), form as many runs of nearly equal length
    as there are representatives, and of each stays the token nearest to the mean of the run's bits. Runs by rank, since
    d_t has only H + 1 values and the paper's buckets by value would mostly be empty; importance is attention received,
    since the row means of its Algorithm 1 are all the same. Where scores are sums over all queries so far (H2O), the
    bits compare them divided by the number of queries that could see the token.

    Chunks and pages are `page` consecutive tokens of a row's own text, kept, represented or left as a whole; what the
    base protects is kept by itself. Their importance is the mean score of their tokens. The paper's experiments name
    both and say that a page's bits are those of its tokens side by side; what it means by a chunk it does not say, and
    here a chunk is what a token is: it has one bit a head. Slots of the budget that hold no whole page stay empty.

    Decoding is the base's own: what is generated comes on top, or evicts by the base's scores, token by token, so that
    under a base that keeps the newest, representatives are the first to leave. KVMerger as a base merges first, and
    representatives stand for the merged entries that do not fit; with theta=None all fit and there is nothing to
    represent. CaM merges while decoding: a representative that leaves hands its value on.

    Args:
        base: the policy that says which tokens are important; its budget is the total.
        share: of the budget, for representatives (the paper's settings: 0.25; best from 0.2 to 0.5).
        anchor: "mean" (the majority of each bit), "alternate" (0101...) or "random" (by the seed).
        pick: "centroid" is the paper's; "grid" takes every so many-th token of the sorted order, first and last
            included; "kmeans" clusters the bits (the paper's Figure 3), at the cost of tokens x representatives.
        upper: the part of the tokens left out that gets the bit 1.
        seed: of the random anchor.
        granularity: what is kept or left as a whole. Pages take any pick but "kmeans", and both any base that chooses
            the highest scores.
        page: tokens of a chunk or page (the paper's pages: 32).
    """
    select = Representatives(
        base.select,
        share,
        anchor=anchor,
        pick=pick,
        upper=upper,
        by_age=type(base.score) is AccumulatedAttention,
        seed=seed,
        granularity=granularity,
        page=page,
    )
    smallest, least = base.budget.smallest, 1 if granularity == "token" else page
    if smallest is not None and int(smallest * share) < least:
        raise ValueError(
            f"share={share} of a budget of {smallest} entries is less than one {granularity}; accepted is a share of "
            f"{least} or more"
        )
    return replace(base, select=select)

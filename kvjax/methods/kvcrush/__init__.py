"""KVCrush (Jha et al., ACML 2025, arXiv 2503.00022): retains representatives of the tokens that a policy leaves out.

`representatives.py` has the selection, `signatures.py` the bits of tokens and pages, `pages.py` the selection of whole
pages without representatives, `query_heads.py` the attention of single query heads.

Differences from the paper, whose Algorithms 1 and 2 are not computable as printed:

- Importance is attention received. The row means of Algorithm 1 are the same for all tokens.
- Buckets are runs of equal length in the order of the distances d_t. There are only H + 1 distances to the anchor, so
  most of the paper's buckets by value would be empty.
- The ones of a head are the tokens that it retains and the upper half of the others, which tells tokens apart that all
  heads leave out. `upper=0.0` is the paper's "retain or evict".
- Bits are per kv head by default and by the scores of the base. `bits="query"` is the paper's H, one bit per query head
  (section 4.3.3: 32 bits for Llama-3-8B), by the attention received from all queries of the prompt (Algorithm 1). The
  configurations of the paper's tables have `bits="query"`.
- Representatives are part of the budget. Of each bucket, the token nearest to the mean of its bits is retained.
  `pick="grid"` takes tokens at even steps of the sorted order, `pick="kmeans"` the clusters of Figure 3.
- Pages are 32 positions of a row's text. The bits of a page are those of its tokens side by side (section 4.3.5), and
  its importance is their mean.
- A chunk is treated as a token is: it has one bit per head. The paper does not say what its chunks are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvjax.policy import Policy, check_choice, check_kind, share_of

from ..registry import preset
from ..snapkv import snapkv
from .pages import Pages
from .query_heads import QueryHeadAttention
from .representatives import Representatives

SNAPKV = snapkv(budget=2048)


@preset
def kvcrush(
    base: Policy = SNAPKV,
    share: float = 0.25,
    anchor: Literal["mean", "alternate"] | int = "mean",
    pick: Literal["centroid", "grid", "kmeans"] = "centroid",
    upper: float = 0.5,
    granularity: Literal["token", "chunk", "page"] = "token",
    page: int = 32,
    bits: Literal["kv", "query"] = "kv",
) -> Policy:
    """Gives a share of the base's budget to tokens that represent those that the base leaves out of the prompt.

        b_t[h] = 1 if head h retains token t or ranks it in the upper half of the tokens that it leaves out, else 0
        d_t = Hamming distance of b_t to the anchor

    The tokens left out, sorted by (d_t, position), form as many runs of nearly equal length as there are
    representatives, and of each run the token nearest to the mean of the run's bits is retained. If scores are sums
    over all queries so far, as those of H2O are, the bits compare them divided by the number of queries that could see
    the token.

    Chunks and pages are `page` consecutive tokens of a row, which are retained, represented or left out together.
    Tokens that the base protects are retained by themselves. The importance of a chunk or page is the mean score of its
    tokens. Slots of the budget that hold no whole page stay empty.

    Decoding is the base's own: the answer is added to the cache, or the base's scores evict token by token, so that
    under a base that retains the most recent tokens, representatives are the first to leave. With `kvmerger` as the
    base, representatives stand for the merged entries that do not fit; with its `merge.theta=None` all fit, and nothing
    is represented. With `cam` as the base, a representative that leaves hands its value on.

    Variants, as text:

    - `kvcrush:bits=query` has one bit per query head, from the attention of all prompt queries, as in the paper.
    - `kvcrush:upper=0.0` sets a bit only if the head retains the token.
    - `kvcrush:granularity=page,page=32` retains, represents or leaves out pages of tokens as a unit.
    - `kvcrush:granularity=page,share=0.0` retains the best pages by mean score: the baseline of Figures 5 and 6.

    Args:
        base: the policy that decides which tokens are important. Its budget is the total.
        share: the share of the budget for representatives, a float in (0, 1). The paper's setting is 0.25; 0.2 to 0.5
            are best. 0.0 with chunks or pages retains the best of them without representatives (the baselines of
            Figures 5 and 6); `anchor`, `pick`, `upper` and `bits` then mean nothing.
        anchor: "mean" (the majority of each bit), "alternate" (0101...), or an integer >= 0: random bits, drawn with
            this seed.
        pick: "centroid" is the paper's; "grid" takes tokens at even steps of the sorted order, first and last included;
            "kmeans" clusters the bits (Figure 3) in time proportional to tokens x representatives.
        upper: the part of the tokens left out that gets the bit 1, a float in [0, 1).
        granularity: "token", "chunk" or "page". Pages accept any pick but "kmeans". Both need a base that retains the
            highest scores one by one.
        page: the number of tokens in a chunk or page (the paper's pages: 32).
        bits: "kv" is one bit per kv head; "query" one bit per query head, for which the attention of every query head
            is summed while the prompt is read, and while decoding if the base evicts then: 4 bytes per slot and query
            head.

    Raises:
        ValueError: for a value that is not accepted, a `share` of less than one token or page, another `kvcrush` as the
            base, or parts of the base that chunks, pages or `bits="query"` cannot be combined with.
    """
    check_kind("base", base, Policy)
    check_choice("granularity", granularity, "token", "chunk", "page")
    if isinstance(share, float) and share == 0 and granularity != "token":
        return replace(base, select=Pages(base.select, page))
    select = Representatives(
        base.select,
        share,
        anchor=anchor,
        pick=pick,
        upper=upper,
        by_age="accumulates" in base.score.needs.marks,
        granularity=granularity,
        page=page,
        bits=bits,
    )
    smallest, least = base.budget.smallest, 1 if granularity == "token" else page
    if smallest is not None and share_of(share, smallest) < least:
        raise ValueError(
            f"share={share} of a budget of {smallest} entries is less than one {granularity}: expected a share of "
            f"{least} entries or more"
        )
    watched = bits == "kv" or "query_heads" in base.score.needs.marks
    return replace(base, score=base.score if watched else QueryHeadAttention(base.score), select=select)

"""R-KV (Cai et al., arXiv 2505.24133): scores by importance minus redundancy, for the long answers of reasoning models.

Differences from the paper and its code:

- The budget counts the entries that a query sees: the paper's B_budget + B_buffer. With every=128 a full head evicts
  128 entries at once, which leaves B_budget.
- lambda is `mix`, 0.07 as in the released code. Of several keys that are similar to a key, the most recent one is not
  counted as redundant, which is the released code's rule "last".
- If no key is similar to a key, the released code exempts the first cached entry from that key's row. Here nothing is
  exempt.
- Each row of a batch has its own similarities. The released code takes those of the first row.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.pallas_kernels import capped
from kvjax.pallas_kernels.arrays import by_member
from kvjax.policy import Moment, Policy, Protect, check_kind, check_number

from .common.budgets import budget_of
from .common.pooling import Pooling
from .common.redundancy import redundancy, softmax
from .common.window_attention import QueryRing, QueryWindow
from .registry import preset


@dataclass(frozen=True)
class JointImportance(QueryWindow):
    """Scores an entry by mix * importance - (1 - mix) * redundancy.

    Importance is the attention from the last `window` queries: the largest logit of the query group, the softmax over
    the entries older than the window, the mean over the queries, then pooling along the text. Redundancy is the softmax
    over all entries of the mean cosine of an entry's key with the keys of the others; see `redundancy`. The state is
    the last `window` queries.

    Attributes:
        window: the number of queries.
        pooling: along the text, of importance.
        mix: the weight of importance, in [0, 1].
        threshold: the cosine above which two keys are similar.
    """

    pooling: Pooling
    mix: float
    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind("pooling", self.pooling, Pooling)
        check_number("mix", self.mix, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        check_number("threshold", self.threshold, "a number in [-1, 1]", lambda x: -1 <= x <= 1)

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        importance = self._importance(entries, moment)
        return self.mix * importance - (1 - self.mix) * redundancy(entries, self.threshold)

    def _importance(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        ring: QueryRing = entries.per_row
        held = entries.positions
        B, H, M, _ = entries.keys.shape

        # One query head of every group after the other, so that the logits of one head are in memory and not of all. A
        # loop of the program would leave the CUDA graph of a step.
        logits = jnp.full((B, H, self.window, M), -jnp.inf)
        for queries in by_member(ring.queries, H):
            new = jnp.einsum("BHRD,BHMD->BHRM", queries, entries.keys, preferred_element_type=jnp.float32)
            logits = jnp.maximum(logits, capped(new * moment.scale, moment.layer.softcap))
        if entries.bias is not None:
            logits = logits + entries.bias[:, :, None]
        distant = self.distant(entries, moment)
        at = ring.positions[..., None]
        visible = distant[:, :, None] & (at >= 0)
        if moment.window is not None:
            visible &= held[:, :, None] > at - moment.window
        weights = softmax(logits, visible)
        importance = jnp.sum(weights, axis=2) / jnp.maximum(jnp.sum(at >= 0, axis=2), 1)
        return self.pooling.along_text(importance, held, distant)


@preset
def rkv(
    budget: int | float = 1024,
    window: int = 8,
    kernel: int = 7,
    mix: float = 0.07,
    threshold: float = 0.5,
    every: int | None = 128,
) -> Policy:
    """Retains the tokens that are important to the newest queries and whose keys are unlike those of others.

    The entries older than the window score

        score[h, c] = mix * I[h, c] - (1 - mix) * R[h, c]
        I[h, c] = pool over c (mean over the last `window` queries r of softmax_c(max over the query group q_r . k_c))
        R[h, c] = softmax_c(mean over entries i of s(i, c)),    s(i, c) = cosine of k_i and k_c

    where s(i, i) = 0, and s(i, c) = 0 if c is the most recent entry with s(i, c) > threshold.

    Args:
        budget: the most entries that a query sees, itself and the buffer included: the paper's B_budget + B_buffer. An
            integer >= 1, or a float in (0, 1] for that share of each row's prompt.
        window: the number of most recent tokens, which are always retained and whose queries score the others (the
            paper's alpha).
        kernel: the size of the max pooling along the text, odd.
        mix: the weight of importance, the paper's lambda.
        threshold: the cosine above which two keys are similar.
        every: the number of tokens that are evicted at a time, the paper's B_buffer. None compresses the prompt only.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than `window` + `every`.
    """
    return Policy(
        score=JointImportance(window, Pooling("max", kernel), mix, threshold),
        budget=budget_of(budget),
        protect=Protect(recent=window),
        every=every,
    )

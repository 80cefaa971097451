"""KVzip (Kim et al., arXiv 2505.23416): retains the entries that the model attends to when it repeats the prompt.

Differences from the paper and its code:

- The best entries of all layers and heads are retained, exactly the budget. `strict=True` is as released: it retains
  the entries above the score of the last one that would fit.
- `sinks` first tokens are always retained, four by default. The released code retains the system prompt.
- Instructions are text without a chat template, unless `score.suffix` gives one. The prompt is replayed whole; kvpress
  leaves out what the template writes before the text, and evicts it but for the sinks.
- `level="head"` is the same number for each head. `level="layer"` is kvpress's.
- The form with scores of heads that were measured beforehand, independent of the context, is not implemented.
- `score.normalise=True` is KVzip+ as in kvpress. Hidden states are those of the replayed tokens, as attention reads
  them: after the norm before attention if the family has one. The maximum is over scaled weights of all query heads of
  the group. The networks of KVzap (arXiv 2601.07891) predict the logarithm of these scores; training here takes
  KVzip's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.checks import check_truth
from kvjax.policy import Attended, Needs, Policy, Protect, Received, check_kind

from .common.levels import budget_of_level
from .common.repetition import LARGEST, Repetition, largest_contributions, largest_weights
from .common.shares import UniformShares
from .registry import preset


@dataclass(frozen=True)
class Reconstruction(Repetition):
    """The largest weight of any query of the group on an entry while the model repeats the entry's chunk.

    The weights are those of a softmax over the first `sinks` entries, the chunk's own entries and the tokens replayed
    so far. On a mesh where devices share a kv head its queries are gathered, once per chunk, and the norms of projected
    values with them.

    KVzip+ scales the weight a[g, t, c] of entry c for query head g of the replayed token t before the maximum:

        score[h, c] = max over g and t of a[g, t, c] |W_O[g] v_c| / |x_t|

    x_t is the hidden state of the replayed token that attention reads, after the norm before attention if the family
    has one. It belongs to t in the replay, not to the prompt's token that t repeats.

    Attributes:
        sinks, chunk, instruction, starting, suffix: see `Repetition`.
        normalise: whether weights are scaled as in KVzip+.

    Raises:
        ValueError: for a value that is not accepted.
    """

    normalise: bool = False

    @property
    def needs(self) -> Needs:
        if self.normalise:
            return replace(super().needs, marks=frozenset({"weighs_values"}), hidden="normed")
        return replace(super().needs, received=Received(LARGEST, calls="replays", slots=self.chunk))

    def observe(self, entries: Slots, attended: Attended) -> tuple[Float[Array, "B H M"], None]:
        if attended.received is None:
            return super().observe(entries, attended)
        # One chunk is the complete prompt, so that the softmax is the attention's own, which was reduced on the way.
        return jnp.where(entries.positions < 0, entries.per_slot, attended.received), None

    def weighed(self, among: Slots, attended: Attended) -> Float[Array, "B H M"]:
        if not self.normalise:
            return largest_weights(among, attended)
        assert attended.hidden is not None
        sizes = jnp.linalg.norm(attended.hidden.astype(jnp.float32), axis=-1)
        return largest_contributions(among, attended, 1 / jnp.maximum(sizes, 1e-30))


SCORE = Reconstruction()


@preset
def kvzip(
    budget: int | float = 0.3,
    sinks: int = 4,
    level: Literal["global", "layer", "head"] = "global",
    strict: bool = False,
    groups: int = 1,
    recent: int = 0,
    score: Reconstruction = SCORE,
) -> Policy:
    """Compresses the prompt by the attention with which the model repeats the prompt, independently of later questions.

    After the prompt, each chunk of it runs once more behind "Repeat the previous context exactly.", over the complete
    cache, and leaves no entries.

        score[h, c] = max over the queries r of this pass and the query group of h of softmax(q_r . k)_c

    The softmax is over the sinks, the chunk's entries and the tokens replayed so far (section 3). Prefill takes two to
    three times as long, and the prompt's complete cache exists until the budget is allocated.

    Variants, as text:

    - `kvzip:recent=48` also retains the last tokens of prompts that end with a question. Otherwise the question is
      scored as the text is.
    - `kvzip:score.normalise=True` is KVzip+: the weight from a query is multiplied by the norm of the value behind the
      output projection, and divided by the norm of the query's hidden state.

    Args:
        budget: entries of the mean kv head, sinks included. A float is a share of each row's prompt.
        sinks: the number of first tokens, which are always retained (the released code: the system prompt).
        level: which heads compete: those of all layers ("global"), those of each layer ("layer", kvpress's layerwise),
            or none, so that each head retains its budget ("head", uniform as released).
        strict: whether the score of the last entry that would fit is a threshold that must be exceeded, as released:
            one entry less is retained. Only with level="global".
        groups: the number of groups of consecutive kv heads that compete among themselves. On a mesh that divides kv
            heads over D devices it must be a multiple of D; one device with that number of groups retains the same.
        recent: the number of last tokens, which are always retained (paper: none). It should cover a question at the
            end of a prompt, which is scored as the text is, and of which a small budget may retain too little.
        score: the length of chunks, the instructions, and whether weights are scaled (KVzip+). Its options are those of
            `Reconstruction`, as text `score.chunk`, `score.normalise` and so on; its sinks are those of the policy.

    Raises:
        ValueError: for a value that is not accepted, for `strict` or `groups` at a level where they mean nothing, and
            for a score with other sinks than `sinks`.
    """
    check_kind("score", score, Reconstruction)
    return by_repetition(score, budget, Protect(sinks, recent), level, strict, groups)


def by_repetition(
    score: Repetition,
    budget: int | float,
    protect: Protect,
    level: Literal["global", "layer", "head"],
    strict: bool,
    groups: int,
) -> Policy:
    """Returns the policy of `kvzip` with any score by repetition, which gets the policy's sinks."""
    check_truth("strict", strict)
    if strict and level != "global":
        raise ValueError(f"strict=True with level={level!r}: expected level='global'")
    if score.sinks not in (SCORE.sinks, protect.sinks):
        raise ValueError(
            f"score.sinks={score.sinks} with sinks={protect.sinks}: expected sinks={score.sinks}, or no score.sinks"
        )
    entries = budget_of_level(budget, level, groups, strict=strict)
    return Policy(
        score=replace(score, sinks=protect.sinks),
        budget=UniformShares(entries) if level == "head" else entries,
        protect=protect,
    )

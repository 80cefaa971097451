"""CriticalKV (Feng et al., arXiv 2502.03805): weighs another policy's scores by what values add to the output.

Differences from the paper and kvpress:

- Scores and norms are means over the query group, since entries are stored per kv head.
- Under a budget that is allocated by score (CriticalAdaKV is `adakv(criticalkv(...))`) the base's scores decide how
  many entries each head retains, and both stages then fill that number. kvpress's CriticalAdaKVPress also retains each
  head's `alpha` safe entries by the base's scores alone; the result is the same for every head whose first stage is as
  large.
- While decoding, the first share is of the entries that remain.
- Scores that may be negative, or whose order alone means something, are refused. kvpress takes any scores: a negative
  one is lower the larger the value is.
- Selections that compare means of scores (`chunkkv`, chunks and pages of `kvcrush`) cannot be combined with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.cache import Slots, mark
from kvjax.pallas_kernels import top_tokens
from kvjax.policy import Moment, Needs, Policy, Score, ScoreWrapper, check_kind, check_number, share_of

from .common.projected_norms import projected_norms
from .common.refusals import check_by_entry
from .registry import preset
from .snapkv import snapkv

SNAPKV = snapkv()


@dataclass(frozen=True)
class ProjectedValues(ScoreWrapper):
    """The base's score times the L1 norm of the projected value, once a first share of each head is filled by the base.

    While an allocated budget compares scores (`Moment.counts` is None), the score is the base's. On a mesh where
    devices share a kv head, they exchange one number per entry.

    Attributes:
        base: the score whose state and needs these are.
        first: the share of the entries that a head retains for which the base's score decides alone, in [0, 1). It is
            rounded down. Protected entries are the first of them. While decoding, it is the share of what remains of
            a full head.
        epsilon: added to the base's score, >= 0.

    Raises:
        ValueError: for a value that is not accepted.
    """

    first: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        check_kind("base", self.base, Score)
        check_number("first", self.first, "a float in [0, 1)", lambda x: isinstance(x, float) and 0 <= x < 1)
        check_number("epsilon", self.epsilon, "a float >= 0", lambda x: isinstance(x, float) and x >= 0)

    @property
    def needs(self) -> Needs:
        needs = self.base.needs
        return replace(needs, slotwise=False, by_count=True, marks=needs.marks | {"weighs_values"})

    def check(self, policy: Policy) -> None:
        super().check(policy)
        name = type(self.base).__name__
        if "weighs_values" in self.base.needs.marks:
            raise ValueError(
                f"its base {name} already multiplies scores by value norms; choose a base that does not, such as one "
                "with value_norm=False"
            )
        if "heads_alike" in self.base.needs.marks:
            raise ValueError(
                f"its base {name} has all heads of a layer retain the same tokens, and value norms give each head its "
                "own; choose a base whose heads differ"
            )
        why = None
        if "ordinal" in self.base.needs.marks:
            why = "gives positions, ranks, draws or classes, of which only the order means something"
        elif "signed" in self.base.needs.marks:
            why = "gives scores that may be negative, which a larger value norm would make smaller"
        if why is not None:
            raise ValueError(
                f"its base {name} {why}; choose a base whose scores are amounts >= 0, such as attention, which can be "
                "multiplied by value norms"
            )
        if "decides" in self.base.needs.marks:
            raise ValueError(
                f"its base {name} scores what a head retains above all others, of which value norms would change "
                "nothing; choose this policy as the base of that one, as in blockwise:base=criticalkv"
            )
        check_by_entry(policy, "scores the entries of its first stage above all others")

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        scores, held = self.base(entries, moment), entries.positions >= 0
        if moment.counts is None:
            return scores
        ranked = scores if moment.protected is None else jnp.where(moment.protected, jnp.inf, scores)
        number = self._first(moment.counts - moment.leaving)
        chosen = top_tokens(jnp.where(held, ranked, -jnp.inf), entries.positions, number, size=entries.slots)
        weighed = (scores + self.epsilon) * self._norms(entries.values, moment)
        above = 2 * jnp.max(jnp.where(held, jnp.abs(weighed), 0), axis=-1, keepdims=True) + 1
        return jnp.where(mark(chosen, entries.slots), weighed + above, weighed)

    def _first(self, remaining: Int[Array, "B H"]) -> Int[Array, "B H"]:
        """Returns the number of entries of the first stage."""
        return share_of(self.first, jnp.maximum(remaining, 0))

    def _norms(self, values: Float[Array, "B H M D"], moment: Moment) -> Float[Array, "B H M"]:
        own = jnp.mean(projected_norms(values, moment.layer.output, order=1), axis=2)
        B, H, M = own.shape
        return jnp.mean(moment.heads.whole_groups(own).reshape(B, H, -1, M), axis=2)


@preset
def criticalkv(base: Policy = SNAPKV, first: float = 0.5, epsilon: float = 1e-4) -> Policy:
    """Fills a share of each head by the base's scores, and the rest by their product with the projected value's norm.

        score[h, c] = (base[h, c] + epsilon) * mean over the query group g of |W_O[g] v_c|_1

    W_O[g] is the rows of the output projection that belong to query head g. What the base protects is part of the first
    share. If the base evicts while decoding, these scores decide as well. The cost is an output projection of all
    cached values.

    Args:
        base: the policy that defines scores, budget and protected tokens.
        first: the share of a head's entries, in [0, 1), for which the base's scores decide alone (the paper's alpha).
        epsilon: added to the base's scores, >= 0, so that a token without attention is judged by its value.

    Raises:
        ValueError: for a value that is not accepted, and for a base whose score weighs values itself, may be negative,
            has no meaning but its order, or decides itself what stays (`blockwise`), whose heads of a layer must retain
            the same tokens, or whose selection compares chunks or pages by their mean scores.
    """
    check_kind("base", base, Policy)
    return replace(base, score=ProjectedValues(base.score, first, epsilon))

"""Scores of a prompt by tokens that run after it, over its complete cache, and leave no entries."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from jaxtyping import Array, Float

from kvjax.cache import Slots
from kvjax.policy import Attended, LayerShape, Moment, Policy, Score

from .refusals import check_prompts_only


@dataclass(frozen=True)
class ReplayedScore(Score):
    """The base of scores that passes over a prompt give its entries. The state is the score of each entry."""

    def check(self, policy: Policy) -> None:
        check_prompts_only(policy)
        if not policy.allocates:
            raise ValueError(
                f"it runs tokens over the complete prompt, and under {policy.budget} each layer is compressed before "
                "the next one reads it; expected a budget that is allocated, such as UniformShares"
            )

    def init(self, shape: LayerShape) -> tuple[Float[Array, "B H S"], None]:
        return shape.per_slot(), None

    @abstractmethod
    def observe(self, entries: Slots, attended: Attended) -> tuple[Float[Array, "B H M"], None]:
        """Returns the scores after a pass, which `attended.replay` tells from the prompt, has attended."""

    def __call__(self, entries: Slots, moment: Moment) -> Float[Array, "B H M"]:
        return entries.per_slot

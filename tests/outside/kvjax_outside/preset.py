"""Large values of tokens whose keys are unlike those of others, written with what `kvjax` and `kvjax.parts` export."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from kvjax import Policy, Protect, Score
from kvjax.parts import Drop, Moment, Needs, Slots, TopTokens, budget_of, check_number, preset, redundancy


@dataclass(frozen=True)
class UnlikeValues(Score):
    """The norm of the value times (1 - the redundancy of the key).

    Attributes:
        threshold: the cosine above which two keys are similar.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, "a number in [-1, 1]", lambda x: -1 <= x <= 1)

    @property
    def needs(self) -> Needs:
        return Needs(marks=frozenset({"weighs_values"}))

    def __call__(self, entries: Slots, moment: Moment):
        norms = jnp.linalg.norm(entries.values.astype(jnp.float32), axis=-1)
        return norms * (1 - redundancy(entries, self.threshold))


@preset
def unlike_values(budget: int | float = 1024, threshold: float = 0.5, sinks: int = 4, recent: int = 16) -> Policy:
    """Retains large values of tokens whose keys are unlike those of others.

    Raises:
        ValueError: for a value that is not accepted, or an integer budget smaller than `sinks` + `recent` + 1.
    """
    return Policy(UnlikeValues(threshold), budget_of(budget), TopTokens(), Drop(), Protect(sinks, recent))


@preset
def snapkv(budget: int | float = 8) -> Policy:
    """A preset by a name that kvjax has: it is left out."""
    return unlike_values(budget)

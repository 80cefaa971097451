"""Scores that are not finite, as of a model that overflows: they count as numbers, and evictions go on."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.parts import AdaptiveShares, Fixed, GlobalShares, TopTokens
from kvjax.policies import parse
from kvjax.policy import Budget, Moment, Policy, Protect, Score
from tests import tiny


@dataclass(frozen=True)
class Broken(Score):
    """In head 0, no number at every third position and the position elsewhere; in head 1 the position."""

    def __call__(self, entries: Slots, moment: Moment) -> jnp.ndarray:
        broken = (entries.positions % 3 == 0) & (jnp.arange(2) == 0)[:, None]
        return jnp.where(broken, jnp.nan, entries.positions.astype(jnp.float32))


@dataclass(frozen=True)
class Alike(Score):
    """One value for all entries."""

    value: float

    def __call__(self, entries: Slots, moment: Moment) -> jnp.ndarray:
        return jnp.full(entries.positions.shape, self.value)


def steps(policy: Policy, length: int, count: int) -> list[list[int]]:
    """The positions that head 0 holds after a prompt, and after each of some steps."""
    params, row = tiny.decoder(), np.arange(length) % tiny.VOCAB
    _, filled = tiny.prefill(params, policy, [row], 16, room=0 if policy.every else count)
    found = [tiny.held(filled, 0)[0][0]]
    for token in range(count):
        _, filled = tiny.step(params, filled, np.array([token]), np.ones(1, bool))
        found.append(tiny.held(filled, 0)[0][0])
    return found


@pytest.mark.parametrize("budget", [Fixed(8), AdaptiveShares(Fixed(8), 1.0, normalise=False)])
def test_they_leave_first(budget: Budget) -> None:
    """A prompt within the budget is retained. A full head then loses the latest of them, and at last numbers."""
    policy = Policy(Broken(), budget, TopTokens(), protect=Protect(recent=1), every=2)
    assert steps(policy, 8, 4) == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 4, 5, 7, 8],
        [0, 1, 2, 4, 5, 7, 8, 9],
        [2, 4, 5, 7, 8, 9, 10],
        [2, 4, 5, 7, 8, 9, 10, 11],
    ]


@pytest.mark.parametrize(
    ("budget", "held"),
    [
        (Fixed(9), [0, 1, 2, 4, 5, 7, 8, 10, 11]),
        (GlobalShares(Fixed(8)), [2, 4, 5, 7, 8, 10, 11]),  # head 1 retains 3 to 11
    ],
)
def test_a_prompt_loses_them_first(budget: Budget, held: list[int]) -> None:
    assert steps(Policy(Broken(), budget), 12, 0) == [held]


def test_a_policy_that_looks_at_no_score_evicts_by_age() -> None:
    policy = parse("cam:budget=6,sinks=1,tokens=2,form=expected")
    broken = Policy(Broken(), policy.budget, policy.select, protect=policy.protect, every=1)
    assert steps(broken, 6, 2) == [[0, 1, 2, 3, 4, 5], [0, 2, 3, 4, 5, 6], [0, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("budget", [Fixed(8), AdaptiveShares(Fixed(8), 1.0, normalise=False)])
def test_infinite_scores_are_numbers(budget: Budget, value: float) -> None:
    """No entry counts as an empty slot or as protected: a budget is filled, and a full head makes room for a token."""
    policy = Policy(Alike(value), budget, protect=Protect(recent=1), every=1)
    assert steps(policy, 6, 0) == [[0, 1, 2, 3, 4, 5]]
    assert steps(policy, 12, 2) == [
        [0, 1, 2, 3, 4, 5, 6, 11],
        [0, 1, 2, 3, 4, 5, 11, 12],
        [0, 1, 2, 3, 4, 5, 12, 13],
    ]

"""The selection of the highest scores: what a decode step evicts."""

from functools import partial

import jax
import numpy as np
import pytest

from kvjax.methods.common.top_tokens import TopTokens, victims_at_once, victims_one_by_one

RNG = np.random.default_rng(0)


def literal(scores: np.ndarray, positions: np.ndarray, count: int) -> list[int]:
    """The slots of one head with the lowest scores, of equal ones those with later positions; not those of +inf."""
    order = sorted(range(len(scores)), key=lambda slot: (scores[slot], -positions[slot]))
    return sorted(slot for slot in order[:count] if scores[slot] < np.inf)


@pytest.mark.parametrize(
    "find", [victims_one_by_one, victims_at_once, lambda *x, count: TopTokens().victims(*x, count)]
)
@pytest.mark.parametrize("count", [1, 4])
def test_victims_have_the_lowest_scores(find, count: int) -> None:
    jitted = jax.jit(partial(find, count=count))
    for _ in range(20):
        scores = RNG.choice(np.float32([0, -0.0, 1, 2, -1.5, -np.inf, np.inf, np.inf]), size=(2, 3, 12))
        scores[0, 0, 1:] = np.inf  # fewer than are to leave
        positions = np.stack([RNG.permutation(12) for _ in range(6)]).reshape(2, 3, 12).astype(np.int32)
        found = np.asarray(jitted(scores, positions))
        for b, h in np.ndindex(2, 3):
            assert sorted(found[b, h][found[b, h] < 12]) == literal(scores[b, h], positions[b, h], count)

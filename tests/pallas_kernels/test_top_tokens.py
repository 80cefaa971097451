"""Exact top-k in XLA against a stable sort."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.pallas_kernels import compact, top_tokens

HEADS, TOKENS = 3, 17
SPECIAL = [-np.inf, np.inf, -0.0, 0.0, 1.0, -1.0, 1e-30, 3.4e38, -3.4e38]
scores = st.lists(
    st.one_of(
        st.sampled_from(SPECIAL),
        st.floats(-2, 2, width=16),
        st.floats(width=32, allow_nan=False, allow_subnormal=False),
    ),
    min_size=TOKENS,
    max_size=TOKENS,
)
jitted = jax.jit(top_tokens, static_argnames="size")
compacted = jax.jit(compact, static_argnums=1)


def by_sorting(scores, positions, count):
    """Returns the ascending indices of the largest scores above -inf, ties to the earlier position."""
    eligible = [i for i in range(len(scores)) if scores[i] > -np.inf]
    return sorted(sorted(eligible, key=lambda i: (-scores[i], positions[i]))[:count])


@pytest.mark.long
@settings(max_examples=60)
@given(st.lists(scores, min_size=HEADS, max_size=HEADS), st.permutations(range(TOKENS)), st.data())
def test_equals_a_stable_sort(rows, positions, data):
    for size in (TOKENS, 5):
        counts = data.draw(st.lists(st.integers(0, size), min_size=HEADS, max_size=HEADS))
        x = np.array(rows, np.float32)[None]
        p = np.stack([np.roll(positions, h) for h in range(HEADS)])[None]
        index = np.asarray(jitted(x, p, np.array([counts]), size=size))
        assert index.shape == (1, HEADS, size)
        for h in range(HEADS):
            expected = by_sorting(x[0, h], p[0, h], counts[h])
            assert index[0, h].tolist() == expected + [-1] * (size - len(expected))


@pytest.mark.slow
def test_all_equal_keeps_the_earliest_positions():
    positions = np.array([[[9, 3, 7, 1]]])
    index = jitted(np.zeros((1, 1, 4), np.float32), positions, np.array([[2]]), size=3)
    assert index.tolist() == [[[1, 3, -1]]]


@pytest.mark.slow
@given(st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS), st.sampled_from([1, 5, TOKENS]))
def test_compact_lists_the_chosen_in_order(chosen, size):
    index = np.asarray(compacted(np.array(chosen)[None, None], size))[0, 0].tolist()
    expected = np.flatnonzero(chosen)[:size].tolist()
    assert index == expected + [-1] * (size - len(expected))

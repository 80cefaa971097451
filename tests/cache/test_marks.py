"""Marks of entries."""

import jax
import numpy as np
import pytest

from kvjax.cache import mark

marked = jax.jit(mark, static_argnums=1)


@pytest.mark.parametrize("index", [[[0]], [[4]], [[5]], [[-1]]])
def test_one_mark_is_what_several_would_be(index: list[list[int]]) -> None:
    one = np.array([index])
    several = np.concatenate([one, np.full_like(one, -1)], axis=-1)
    np.testing.assert_array_equal(marked(one, 5), marked(several, 5))

"""Parts in turns: the results of `jax.lax.map`, and no loop for a few parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods.common.in_turns import AT_ONCE, in_turns


@pytest.mark.parametrize("parts", [1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE + 3])
def test_results_are_those_of_a_map(parts: int) -> None:
    given = np.random.default_rng(0).normal(size=(parts, 5)).astype(np.float32), np.arange(parts)

    def function(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.cumsum(part[0]) * part[1]

    program = jax.jit(lambda given: in_turns(function, given))
    expected = np.stack([np.cumsum(row) * number for row, number in zip(*given, strict=True)])
    np.testing.assert_allclose(program(given), expected, rtol=1e-5, atol=1e-6)
    assert ("while" in program.lower(given).as_text()) == (parts > AT_ONCE)

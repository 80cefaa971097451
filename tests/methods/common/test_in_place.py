"""A change that may be left out has the derivative of a choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods.common.in_place import changed_if


@pytest.mark.parametrize("holds", [False, True])
def test_the_value_and_its_derivatives(holds: bool) -> None:
    """By what is changed, and by what the change reads."""

    def changed(x: jax.Array, factor: jax.Array) -> jax.Array:
        return changed_if(jnp.array(holds), lambda x: jnp.sin(x) * factor, x)

    x, factor = jnp.array([0.3, 1.2]), jnp.array([2.0, 5.0])
    value, back = jax.vjp(jax.jit(changed), x, factor)
    by_x, by_factor = back(jnp.ones(2))
    expected = (jnp.sin(x) * factor, jnp.cos(x) * factor, jnp.sin(x)) if holds else (x, jnp.ones(2), jnp.zeros(2))
    for own, wanted in zip((value, by_x, by_factor), expected, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-6)

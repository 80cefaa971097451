"""The product of a single row on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.decoder import linear


@pytest.mark.parametrize(("inputs", "outputs"), [(256, 96), (255, 64), (2, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [(1, 1), (1,), (), (2, 1), (1, 3)])
def test_any_rows_are_multiplied(inputs, outputs, dtype, rows):
    rng = np.random.default_rng(inputs)
    x, weight = rng.normal(size=(*rows, inputs)), rng.normal(size=(inputs, outputs)) / inputs**0.5
    x, weight = (jnp.asarray(a, dtype) for a in (x, weight))
    got = linear(x, weight, None)
    assert got.dtype == dtype
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=1e-5 if dtype == jnp.float32 else 5e-2)


def test_the_halves_of_a_weight_are_read_in_place():
    """In a decode step nothing of the size of a weight is written."""
    arrays = jax.ShapeDtypeStruct((1, 1, 512), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.float32)
    compiled = jax.jit(lambda x, weight: linear(x, weight, None)).lower(*arrays).compile()
    if jax.default_backend() == "cpu":
        assert "f32[2,256]" in compiled.as_text(), "there are no two halves"
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 256

"""Products that are written for a platform: bits of a lone row, and NumPy's results."""

import jax
import numpy as np
import pytest

from kvjax.pallas_kernels import dot_products, matmul, weighted_sum
from tests.dense import assert_close

RNG = np.random.default_rng(0)


@pytest.mark.usefixtures("optimized")
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices compute a lone row in their own way")
def test_a_lone_row_has_the_bits_that_it_has_in_a_batch() -> None:
    """With 512 inputs. `x @ weight` would sum a lone row in another order, which this test would see."""
    rows = RNG.normal(size=(8, 1, 512)).astype(np.float32)
    weight = RNG.normal(size=(512, 512)).astype(np.float32)
    multiply = jax.jit(matmul)
    for batch in (2, 3, 8):
        together = np.asarray(multiply(rows[:batch], weight))
        for row, expected in zip(rows[:batch], together, strict=True):
            np.testing.assert_array_equal(multiply(row, weight), expected)


@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 1, 63), (3, 1, 64), (2, 5, 64), (64,)])
def test_matmul(shape: tuple[int, ...]) -> None:
    x, weight = RNG.normal(size=shape).astype(np.float32), RNG.normal(size=(shape[-1], 40)).astype(np.float32)
    got = jax.jit(matmul)(x, weight)
    assert got.dtype == np.float32
    assert_close(got, x.astype(np.float64) @ weight.astype(np.float64))


@pytest.mark.parametrize("platform", ["cpu", "default"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_with_one_vector_per_head(dtype: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of each platform."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, **forms: forms[platform](*arrays))
    keys = np.asarray(jax.numpy.asarray(RNG.normal(size=(2, 3, 40, 16)), dtype))
    weights, vector = RNG.normal(size=(2, 3, 40)).astype(np.float32), RNG.normal(size=(2, 3, 16)).astype(np.float32)
    wide = keys.astype(np.float64)
    assert_close(jax.jit(weighted_sum)(keys, weights), np.einsum("bhmd,bhm->bhd", wide, weights))
    assert_close(jax.jit(dot_products)(keys, vector), np.einsum("bhmd,bhd->bhm", wide, vector))

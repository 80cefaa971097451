"""What is written for a platform: bits of a lone row, and NumPy's results."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import dot_products, matmul, shared, weighted_sum
from tests.dense import assert_close
from tests.pallas_kernels.checks import of_platform

RNG = np.random.default_rng(0)


def traced_anew(function: Callable[..., Any]) -> Any:
    """A function under jit that is not the trace of another platform's form."""
    return jax.jit(lambda *arrays: function(*arrays))


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


@pytest.mark.parametrize("platform", ["cpu", "cuda", "default"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 1, 63), (3, 1, 64), (2, 5, 64), (64,)])
def test_matmul(shape: tuple[int, ...], dtype: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of each platform."""
    monkeypatch.setattr(jax.lax, "platform_dependent", of_platform(platform))
    x, weight = (jnp.asarray(RNG.normal(size=sizes), dtype) for sizes in (shape, (shape[-1], 40)))
    got = traced_anew(matmul)(x, weight)
    assert got.dtype == dtype
    tolerance = {"float32": 1e-5, "bfloat16": 2**-7}[dtype]
    wide = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), wide, rtol=tolerance, atol=8 * tolerance)


def lowered_for_a_gpu(function: Callable[..., Any], *arrays: jax.Array) -> str:
    return traced_anew(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_a_gpu_multiplies_a_lone_row_beside_zeros() -> None:
    alone, together = (lowered_for_a_gpu(matmul, jnp.ones((n, 1, 64)), jnp.ones((64, 40))) for n in (1, 2))
    assert "tensor<2x40xf32>" in alone
    assert "stablehlo.pad" in alone
    assert "stablehlo.pad" not in together


@pytest.mark.parametrize(("batch", "read"), [(1, 2), (3, 3)])
def test_layers_of_a_gpu_share_an_array(batch: int, read: int) -> None:
    """A single number is a part of one."""
    lowered = lowered_for_a_gpu(shared, jnp.ones(batch, jnp.int32))
    assert re.search(rf"optimization_barrier .*tensor<{read}xi32>", lowered)
    for x in (jnp.arange(5, 5 + batch), jnp.arange(batch) < 1):
        np.testing.assert_array_equal(jax.jit(shared)(x), x)


@pytest.mark.parametrize("platform", ["cpu", "default"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_with_one_vector_per_head(dtype: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the form of each platform."""
    monkeypatch.setattr(jax.lax, "platform_dependent", of_platform(platform))
    keys = np.asarray(jnp.asarray(RNG.normal(size=(2, 3, 40, 16)), dtype))
    weights, vector = RNG.normal(size=(2, 3, 40)).astype(np.float32), RNG.normal(size=(2, 3, 16)).astype(np.float32)
    wide = keys.astype(np.float64)
    assert_close(traced_anew(weighted_sum)(keys, weights), np.einsum("bhmd,bhm->bhd", wide, weights))
    assert_close(traced_anew(dot_products)(keys, vector), np.einsum("bhmd,bhd->bhm", wide, vector))

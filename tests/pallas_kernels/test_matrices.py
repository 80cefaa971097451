"""Linear algebra of batches: NumPy's results, and on CPUs one matrix at a time."""

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.pallas_kernels import matrices


def positive(*shape: int) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal(shape)
    return x @ np.swapaxes(x, -1, -2) + np.eye(shape[-1])


def test_results_are_those_of_numpy() -> None:
    x, y = positive(2, 3, 5, 5), np.random.default_rng(1).standard_normal((2, 3, 5, 4))
    low = np.linalg.cholesky(x)
    values, vectors = jax.jit(matrices.eigh)(x)
    np.testing.assert_allclose(values, np.linalg.eigh(x)[0], rtol=1e-4)
    np.testing.assert_allclose(vectors * values[..., None, :] @ np.swapaxes(vectors, -1, -2), x, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(jax.jit(matrices.cholesky)(x), low, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.jit(matrices.solve_lower)(low, y), np.linalg.solve(low, y), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(jax.jit(matrices.solve_positive)(x, y), np.linalg.solve(x, y), rtol=1e-3, atol=1e-3)


def test_a_vmapped_batch_is_the_batch() -> None:
    x, y = positive(2, 3, 5, 5), np.random.default_rng(1).standard_normal((2, 3, 5, 4))
    apart = jax.jit(jax.vmap(jax.vmap(matrices.solve_positive)))(x, y)
    np.testing.assert_allclose(apart, matrices.solve_positive(jnp.asarray(x), jnp.asarray(y)), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices compute a batch at once")
@pytest.mark.parametrize("f", [matrices.eigh, matrices.cholesky, matrices.solve_lower, matrices.solve_positive])
def test_calls_of_lapack_have_one_matrix(f: Callable[..., jax.Array]) -> None:
    x = jnp.asarray(positive(2, 3, 5, 5), jnp.float32)
    text = jax.jit(f).lower(*[x] * (2 if "solve" in f.__name__ else 1)).compile().as_text()
    calls = re.findall(r"= (.*) custom-call\(.*custom_call_target=\"(?:lapack|blas)_", text)
    assert calls
    for shapes in calls:
        assert not re.search(r"\[(?:[2-9]|\d\d+),\d+,\d+|\[\d+,(?:[2-9]|\d\d+),\d+,\d+", shapes), shapes


def test_no_other_module_calls_lapack() -> None:
    for path in Path(kvjax.__file__).parent.rglob("*.py"):
        if path.name != "matrices.py":
            found = re.findall(r"(?<!\bnp\.)linalg\.(?!norm\b)\w+", path.read_text())  # NumPy's may stay
            assert not found, f"{path}: {found}; expected the functions of kvjax/pallas_kernels/matrices.py"

"""The exponential function of the backend `xla` against NumPy's in double precision."""

from __future__ import annotations

import jax
import numpy as np

from kvjax.pallas_kernels.xla.exponential import exp


def test_is_the_exponential_function():
    """Under jit too, where XLA simplifies sums of constants."""
    x = np.linspace(-87, 88, 100_001, dtype=np.float32)
    expected = np.exp(x.astype(np.float64))
    for function in (exp, jax.jit(exp)):
        error = np.abs(np.asarray(function(x)) / expected - 1)
        assert np.all(error <= 3e-7 + 1e-7 * np.abs(x))


def test_is_zero_far_below_zero_and_one_at_zero():
    x = np.float32([-np.inf, -1e30, -200, -88, 0])
    np.testing.assert_array_equal(jax.jit(exp)(x), [0, 0, 0, 0, 1])
    with jax.debug_nans(True), jax.disable_jit():
        np.testing.assert_array_equal(exp(x), [0, 0, 0, 0, 1])

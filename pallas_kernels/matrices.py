"""Linear algebra of batches of matrices.

jaxlib 0.10 divides a batch among the threads that run a program on a CPU, and waits for them on one of these threads. A
program with as many such calls at once as there are threads never ends: on two cores, two policies that share a prefill
are enough. On CPUs the matrices of a batch therefore take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def eigh(x: Float[Array, "*lead N N"]) -> tuple[Float[Array, "*lead N"], Float[Array, "*lead N N"]]:
    """The eigenvalues of symmetric matrices in ascending order, and the eigenvectors as columns."""
    return _in_turn(lambda x: tuple(jnp.linalg.eigh(x)), x)


def cholesky(x: Float[Array, "*lead N N"]) -> Float[Array, "*lead N N"]:
    """The lower Cholesky factors of positive definite matrices."""
    return _in_turn(jnp.linalg.cholesky, x)


def solve_lower(x: Float[Array, "*lead N N"], y: Float[Array, "*lead N K"]) -> Float[Array, "*lead N K"]:
    """The solutions z of x z = y for lower triangular x."""
    return _in_turn(partial(jax.scipy.linalg.solve_triangular, lower=True), x, y)


def solve_positive(x: Float[Array, "*lead N N"], y: Float[Array, "*lead N K"]) -> Float[Array, "*lead N K"]:
    """The solutions z of x z = y for positive definite x."""
    return _in_turn(partial(jax.scipy.linalg.solve, assume_a="pos"), x, y)


def _in_turn(f: Callable[..., Any], *arrays: Array) -> Any:
    """f of each matrix of a batch."""
    together, alone = f, jax.custom_batching.sequential_vmap(f)
    for _ in arrays[0].shape[:-2]:
        together, alone = jax.vmap(together), jax.vmap(alone)
    return jax.lax.platform_dependent(*arrays, cpu=alone, default=together)

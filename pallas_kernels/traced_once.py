"""Functions that a program of many equal layers traces once and calls once per layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import numpy as np

Function = TypeVar("Function", bound=Callable[..., Any])


def traced_once(function: Function) -> Function:
    """Returns the function, which is traced once for all calls with equal shapes and options while `jax.jit` traces.

    Tracing and lowering then take the time of one layer. XLA inlines the calls and compiles the same program. Outside
    of a trace the function runs as it is, because a program of its own would have to be compiled.

    Args:
        function: a pure function of pytrees. Leaves that are no arrays are options, which must be hashable.
    """

    @partial(jax.jit, static_argnums=(0, 1))
    def run(structure: Any, options: tuple[Any, ...], arrays: list[jax.Array]) -> Any:
        rest = iter(arrays)
        leaves = [next(rest) if kind is jax.Array else value for kind, value in options]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        return function(*args, **kwargs)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, kwargs))
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return function(*args, **kwargs)
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        # The type belongs to an option, because 1, 1.0 and True are equal.
        options = tuple(
            (jax.Array, None) if array else (type(leaf), leaf) for leaf, array in zip(leaves, is_array, strict=True)
        )
        return run(structure, options, [leaf for leaf, array in zip(leaves, is_array, strict=True) if array])

    return call  # type: ignore[return-value]

"""A change that may be left out, without a copy of what it would change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

Value = TypeVar("Value")


def changed_if(condition: Bool[Array, ""], change: Callable[[Value], Value], value: Value) -> Value:
    """Returns `change(value)` if the condition holds, else the value, whose arrays then stay in place.

    It is a loop of one round or none, which XLA runs in place. JAX cannot differentiate such a loop backwards, which
    `kvjax.inspection` does, so the derivative is that of `jax.lax.cond`.
    """
    change, closed = jax.closure_convert(change, value)

    def loop(value: Value, condition: Array, *closed: Any) -> Value:
        return jax.lax.fori_loop(0, condition.astype(jnp.int32), lambda _, now: change(now, *closed), value)

    def choice(value: Value, condition: Array, *closed: Any) -> Value:
        return jax.lax.cond(condition, lambda now: change(now, *closed), lambda now: now, value)

    run = jax.custom_vjp(loop)
    run.defvjp(lambda *given: (loop(*given), given), lambda given, back: jax.vjp(choice, *given)[1](back))
    return run(value, condition, *closed)

"""Functions that allocated budgets share: checks, scores above all others, exact parts of a number."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policy import Budget, check_alike, check_kind, check_number, most_entries


def check_share(name: str, value: Any) -> None:
    """Raises ValueError unless `value` is a number from 0 to 1."""
    check_number(name, value, "a number from 0 to 1", lambda x: 0 <= x <= 1)


def check_limited(budget: Budget) -> None:
    """Raises ValueError if a budget lets the first layer retain everything, or rises with the answer."""
    check_kind("budget", budget, Budget)
    if budget.pace is not None:
        raise ValueError(
            f"a budget of {budget}, which rises with the answer: expected one that is known once the prompt is read, "
            "since it is allocated then"
        )
    if most_entries(budget, 0, 1, 1) is None:
        raise ValueError(
            f"a budget of {budget}: expected one that limits every layer, since a layer that retains everything has "
            "nothing to allocate"
        )


def check_mean(budget: Budget) -> None:
    """Raises ValueError unless a budget is the same number of entries for all layers."""
    check_limited(budget)
    check_alike(budget)


def raise_best(scores: Float[Array, "B X M"], least: int | Int[Array, "#B #X"]) -> Float[Array, "B X M"]:
    """Returns the scores of each X in any order, with +inf in place of its `least` best, or of all if it has fewer.

    For counts of the best scores, which do not depend on the order.
    """
    if isinstance(least, int) and least == 0:
        return scores
    ordered = jnp.flip(jnp.sort(scores, axis=-1), axis=-1)
    raised = jnp.arange(scores.shape[-1]) < jnp.asarray(least)[..., None]
    return jnp.where(raised & (ordered > -jnp.inf), jnp.inf, ordered)


def scaled(a: Int[Array, "..."], b: Int[Array, "..."], c: Int[Array, "..."]) -> Int[Array, "..."]:
    """Returns floor(a * b / max(c, 1)) for c <= 2^29 by long multiplication: the product may exceed 32 bits."""
    c = jnp.maximum(c, 1)
    quotient_of_b, part = jnp.divmod(b, c)

    def add_bit(i: Array, sum_and_rest: tuple[Array, Array]) -> tuple[Array, Array]:
        quotient, rest = sum_and_rest
        rest = 2 * rest + jnp.where((a >> (30 - i)) & 1, part, 0)
        return 2 * quotient + rest // c, rest % c

    zeros = jnp.zeros(jnp.broadcast_shapes(a.shape, b.shape, c.shape), jnp.int32)
    quotient, _ = jax.lax.fori_loop(0, 31, add_bit, (zeros, zeros))
    return a * quotient_of_b + quotient

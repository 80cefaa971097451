"""Entries in proportion to a number for each head of a model, exactly as many as there are to give."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.checks import shown

from .head_numbers import HeadNumbers, check_groups, head_numbers


def check_proportions(name: str, numbers: HeadNumbers, groups: int) -> None:
    """Raises ValueError unless there is a number >= 0 for each kv head of each layer, and in each group one above 0."""
    rows = head_numbers(name, numbers)
    check_groups(groups, len(rows[0]))
    if np.min(rows) < 0 or not np.all(np.sum(_by_group(rows, groups), axis=(0, 2))):
        raise ValueError(f"{name}={shown(rows)}: expected numbers >= 0, and one above 0 in each of {groups} groups")


def proportions(numbers: HeadNumbers, groups: int) -> Float[np.ndarray, "L H"]:
    """The numbers on the scale on which the mean of each group, over all layers, is 1."""
    own = _by_group(numbers, groups)
    return (own / np.mean(own, axis=(0, 2), keepdims=True)).reshape(len(numbers), -1)


def apportioned(shares: Float[Array, "L H"], means: Int[Array, "B"], groups: int) -> Int[Array, "L B H"]:
    """Entries in proportion to the shares, rounded by largest remainders: in each group, the mean times its L H heads.

    Of equal remainders the earlier layer's and head's is rounded up. Nothing is summed but integers, so that groups on
    devices of their own give the same.

    Args:
        shares: of this device's kv heads, as `proportions` gives them.
        means: entries of the mean head of each row.
        groups: the number of groups of consecutive kv heads on this device.
    """
    L, H = shares.shape
    own = jnp.moveaxis(shares.reshape(L, groups, H // groups), 1, 0).reshape(groups, -1)
    wanted = own * means[:, None, None]
    given = jnp.floor(wanted).astype(jnp.int32)
    left = means[:, None] * own.shape[1] - jnp.sum(given, axis=-1)
    rank = jnp.argsort(jnp.argsort(given - wanted, axis=-1, stable=True), axis=-1)
    given += rank < left[..., None]
    return jnp.moveaxis(given.reshape(len(means), groups, L, -1), 2, 0).reshape(L, len(means), H)


def _by_group(numbers: HeadNumbers, groups: int) -> Float[np.ndarray, "L groups heads"]:
    return np.array(numbers, float).reshape(len(numbers), groups, -1)

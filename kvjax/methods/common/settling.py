"""The refusals of storages that settle a prompt into entries of another form."""

from __future__ import annotations

from kvjax.policy import Policy

from .own_positions import check_own_positions


def check_settling(name: str, does: str, policy: Policy) -> None:
    """Raises ValueError unless a policy compresses prompts only, in slots, and without biases.

    Args:
        name: of the storage.
        does: says what it does with the entries of a prompt, as in "drops channels of keys".
    """
    check_own_positions(policy, f"{name} {does} that were rotated when they came in")
    if policy.every is not None:
        raise ValueError(
            f"{name} {does} once, when a prompt has been read, and every={policy.every} evicts while decoding; "
            "expected a policy with every=None"
        )
    if policy.allocates:
        raise ValueError(
            f"{type(policy.budget).__name__} stores heads in segments of different lengths, and {name} stores the same "
            "number of entries for each head of a layer; they cannot be combined"
        )
    if policy.merge.effects.bias:
        raise ValueError(
            f"{type(policy.merge).__name__} weighs entries by a bias, which the entries of {name} do not have; they "
            "cannot be combined"
        )

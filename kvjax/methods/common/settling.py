"""The refusals of storages that settle a prompt into entries of another form."""

from __future__ import annotations

from kvjax.policy import Policy

from .refusals import check_own_positions


def check_settling(does: str, policy: Policy) -> None:
    """Raises ValueError unless a policy compresses prompts only, in slots, and without biases.

    Args:
        does: the action of the storage on the entries of a prompt, as in "drops channels of keys".
    """
    check_own_positions(policy, f"{does} that were rotated when they came in")
    if policy.every is not None:
        raise ValueError(
            f"it {does} once, when a prompt has been read, and every={policy.every} evicts while decoding; "
            "expected a policy with every=None"
        )
    if policy.allocates:
        raise ValueError(
            f"it stores the same number of entries for each head of a layer, and the budget "
            f"{type(policy.budget).__name__} stores heads in segments of different lengths; they cannot be combined"
        )
    if policy.merge.effects.bias:
        raise ValueError(
            f"its entries have no bias, by which the merge {type(policy.merge).__name__} weighs entries; they cannot "
            "be combined"
        )

"""The refusal of keys that are rotated anew, for parts that rely on the position at which a key came in."""

from __future__ import annotations

from kvjax.policy import Policy


def check_own_positions(policy: Policy, why: str) -> None:
    """Raises ValueError unless each token keeps its own position in the cache.

    Args:
        why: names the part, and says what it does with keys at their own positions.
    """
    if policy.positions != "original":
        raise ValueError(f"{why}; it cannot be combined with positions={policy.positions!r}")


def check_first_rotation(name: str, policy: Policy) -> None:
    """The same for a score `name` that asks the keys of a prompt as its queries met them."""
    check_own_positions(policy, f"{name} scores the prompt's keys as they were rotated when they came in")

"""The base of all parts of a policy, and checks that parts share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .policy import Policy


class Part:
    """A piece of a policy: a frozen dataclass, so that a policy hashes and is a static argument of `jax.jit`.

    What changes from step to step lives in the cache, as state per slot and per row.
    """

    def check(self, policy: Policy) -> None:
        """Raises ValueError if the part makes no sense in that policy."""
        return


def check_integer(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` is an integer of Python from `least` to 2**31 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: expected an integer >= {least}")
    if value >= 2**31:
        raise ValueError(f"{name}={value!r}: expected an integer < 2**31")


def check_choice(name: str, value: Any, *choices: Any) -> None:
    """Raises ValueError unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: expected {' or '.join(map(repr, choices))}")

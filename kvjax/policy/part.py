"""The base of all parts of a policy, and checks that parts share."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from kvjax.checks import check_truth, is_number, shown

if TYPE_CHECKING:
    from .policy import Policy


class Part:
    """A piece of a policy: a frozen dataclass, so that a policy hashes and is a static argument of `jax.jit`.

    What changes from step to step lives in the cache, as state per slot and per row.
    """

    def check(self, policy: Policy) -> None:
        """Raises ValueError if the part makes no sense in that policy. The policy puts the part's name before it."""
        return


@contextmanager
def named(who: str, instead_of: Container[str] = ()) -> Iterator[None]:
    """Begins the message of a ValueError with `who: `, so that it names what a user called.

    Args:
        instead_of: names of parts and presets that `who` is made of. One that the message begins with is left out.
    """
    try:
        yield
    except ValueError as error:
        within, _, reason = str(error).partition(": ")
        error.args = (f"{who}: {reason if within in instead_of else error}",)
        raise


def check_truths(part: Any) -> None:
    """Raises ValueError unless each field of a part and of the parts within it that is declared `bool` is one."""
    for field in fields(part) if is_dataclass(part) else ():
        value = getattr(part, field.name)
        if field.type in (bool, "bool"):
            check_truth(field.name, value)
        elif isinstance(value, Part):
            check_truths(value)


def check_integer(name: str, value: Any, least: int) -> None:
    """Raises ValueError unless `value` is an integer of Python from `least` to 2**31 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={shown(value)}: expected an integer >= {least}")
    if value >= 2**31:
        raise ValueError(f"{name}={shown(value)}: expected an integer < 2**31")


def check_number(name: str, value: Any, accepted: str, fits: Callable[[float], bool]) -> None:
    """Raises ValueError unless `value` is a finite number for which `fits` holds, as `accepted` states in words."""
    if not is_number(value) or not fits(value):
        raise ValueError(f"{name}={shown(value)}: expected {accepted}")


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raises ValueError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise ValueError(f"{name}={shown(value)}: expected a {kind.__name__}")


def check_choice(name: str, value: Any, *choices: Any) -> None:
    """Raises ValueError unless `value` is one of the choices."""
    if (type(value), value) not in [(type(choice), choice) for choice in choices]:  # True and 8.0 are not 1 and 8
        raise ValueError(f"{name}={shown(value)}: expected {' or '.join(map(repr, choices))}")

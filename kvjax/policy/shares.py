"""Shares of integers, counted in integers, so that 0.1 of 10 is 1."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, TypeVar

from jaxtyping import Array

from .part import check_number

FINEST = 10_000  # the largest denominator of a share
Total = TypeVar("Total", int, Array)


def ratio_of(share: float | Fraction) -> Fraction:
    """Returns the share as people write it, so that 0.1 is exactly one tenth."""
    return Fraction(share).limit_denominator(FINEST)


def share_of(share: float | Fraction, total: Total) -> Total:
    """Returns the share of an integer, rounded down. No product is much larger than the result."""
    whole, part = divmod(ratio_of(share), 1)
    numerator, denominator = part.as_integer_ratio()
    return total * whole + total // denominator * numerator + total % denominator * numerator // denominator


def check_share_of(name: str, value: Any, whole: str) -> None:
    """Raises ValueError unless a value is a share of a whole that `ratio_of` can state."""
    check_number(name, value, f"a share of {whole} above 0 and at most 1", lambda x: 0 < x <= 1)
    check_number(name, value, f"a share of {whole} of 1/{FINEST} or more", lambda x: x >= 1 / FINEST)

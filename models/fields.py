"""Reading fields of a Hugging Face `config.json`: a value that is accepted, or an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UnsupportedModelError(ValueError):
    """A config asks for an architecture or a computation that this library does not implement."""


def refuse(field: str, value: Any, accepted: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"config field {field}={value!r} is not supported; accepted: {accepted}")


def require(hf: Mapping[str, Any], field: str, *accepted: Any) -> None:
    """Raises UnsupportedModelError if `field` of a Hugging Face config is present and not one of `accepted`."""
    if field in hf and hf[field] not in accepted:
        raise UnsupportedModelError(
            f"config field {field}={hf[field]!r} is not supported for model_type={hf.get('model_type')!r}; "
            f"accepted: {', '.join(repr(value) for value in accepted)}"
        )


def integer(hf: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A positive integer; `default` where the field is absent or null. Raises UnsupportedModelError."""
    value: Any = default if hf.get(field) is None else hf[field]
    if type(value) is not int or value < 1:
        raise refuse(field, value, "a positive integer")
    return value


def number(hf: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """A positive number; `default` where the field is absent or null. Raises UnsupportedModelError."""
    value: Any = default if hf.get(field) is None else hf[field]
    if type(value) not in (int, float) or not value > 0:
        raise refuse(field, value, "a positive number")
    return float(value)


def numbers(hf: Mapping[str, Any], field: str) -> tuple[float, ...]:
    """A list of positive numbers. Raises UnsupportedModelError."""
    value = hf.get(field)
    if not isinstance(value, list) or not all(type(x) in (int, float) and x > 0 for x in value):
        raise refuse(field, value, "a list of positive numbers")
    return tuple(float(x) for x in value)


def flag(hf: Mapping[str, Any], field: str, default: bool = False) -> bool:
    """True or false; `default` where the field is absent or null. Raises UnsupportedModelError."""
    value: Any = default if hf.get(field) is None else hf[field]
    if type(value) is not bool:
        raise refuse(field, value, "true or false")
    return value

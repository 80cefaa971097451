"""Readers of `config.json` fields. Each returns a valid value or raises an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # the normal numbers of float32
LAYERS = 10_000  # the most layers of a model; more are a mistake


class UnsupportedModelError(ValueError):
    """Raised if a config asks for an architecture or a computation that kvjax does not implement.

    The message names the field, its value and what is accepted. Users catch it as
    `kvjax.models.UnsupportedModelError`; it is a ValueError.
    """


def unsupported(field: str, value: Any, accepted: str) -> UnsupportedModelError:
    """Returns, for the caller to raise, the error for a field with a value that is not accepted."""
    return UnsupportedModelError(f"config field {field}={value!r} is not supported; accepted: {accepted}")


def require(hf: Mapping[str, Any], field: str, *accepted: Any) -> None:
    """Raises UnsupportedModelError if `field` is present and its value is not one of `accepted`."""
    if field in hf and hf[field] not in accepted:
        raise UnsupportedModelError(
            f"config field {field}={hf[field]!r} is not supported for model_type={hf.get('model_type')!r}; "
            f"accepted: {', '.join(repr(value) for value in accepted)}"
        )


def integer(hf: Mapping[str, Any], field: str, default: int | None = None, most: int = 2**31 - 1) -> int:
    """Reads a positive integer up to `most`; an absent or null field is `default`. Raises UnsupportedModelError."""
    value: Any = default if hf.get(field) is None else hf[field]
    if type(value) is not int or value < 1:
        raise unsupported(field, value, "a positive integer")
    if value > most:
        raise unsupported(field, value, f"a positive integer <= {most}")
    return value


def layer_count(hf: Mapping[str, Any]) -> int:
    """Reads the number of layers. Raises UnsupportedModelError."""
    return integer(hf, "num_hidden_layers", most=LAYERS)


def number(hf: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """Reads a positive number; an absent or null field is `default`. Raises UnsupportedModelError."""
    value: Any = default if hf.get(field) is None else hf[field]
    if not _is_positive(value):
        raise unsupported(field, value, "a positive number of float32's range")
    return float(value)


def numbers(hf: Mapping[str, Any], field: str) -> tuple[float, ...]:
    """Reads a list of positive numbers. Raises UnsupportedModelError."""
    value = hf.get(field)
    if not isinstance(value, list) or not all(map(_is_positive, value)):
        raise unsupported(field, value, "a list of positive numbers of float32's range")
    return tuple(float(x) for x in value)


def _is_positive(value: Any) -> bool:
    """Returns whether a value is a number > 0 that float32 represents."""
    return type(value) in (int, float) and SMALLEST <= value <= LARGEST


def flag(hf: Mapping[str, Any], field: str, default: bool = False) -> bool:
    """Reads a boolean; an absent field is `default`, and null is false. Raises UnsupportedModelError."""
    value: Any = hf.get(field, default)
    if value is None:
        return False
    if type(value) is not bool:
        raise unsupported(field, value, "true or false")
    return value

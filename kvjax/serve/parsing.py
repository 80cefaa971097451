"""Parses the bytes of a request into its fields, or to an error that names the field that was sent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from kvjax.checks import cut

from .errors import ApiError
from .fields import Strict

Kind = TypeVar("Kind", bound=Strict)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Reads a request. Raises ApiError, which names the field, the value and what is accepted."""
    try:
        document = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body is no JSON object: expected one with the fields of the request")
    for name in document:
        if name not in kind.model_fields:
            raise _unknown([name], kind)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _told(kind, document, error) from None


def _told(kind: type[BaseModel], document: Any, error: ValidationError) -> ApiError:
    """The error about the deepest field: where a value may have several types, the type that fits the furthest."""
    details = error.errors(include_url=False)
    paths = [_path(document, one) for one in details]
    path, first = max(zip(paths, details, strict=True), key=_fit)
    value, absent = document, False
    for name in path:
        absent = isinstance(value, dict) and name not in value
        value = None if absent else value[name]
    if absent:
        return ApiError(400, f"{_joined(path)} is missing", str(path[0]), "missing_required_parameter")
    holder = owner = kind
    field = 0
    for i, name in enumerate(path):
        if isinstance(name, str) and name in holder.model_fields:
            owner, field = holder, i  # the innermost field that says what it accepts
            holder = _object_of(holder.model_fields[name].annotation) or holder
    if first["type"] == "unknown":
        return _unknown(path, holder)
    expected = owner.model_fields[str(path[field])].description
    of = f"{_joined(path[: field + 1])} to be " if field + 1 < len(path) else ""
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return ApiError(400, f"{_joined(path)}={_shown(value)}: expected {of}{expected}", str(path[0]), code)


def _object_of(annotation: Any) -> type[BaseModel] | None:
    """The type of the objects in a field, as one value or several; None if it has none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_object_of, get_args(annotation))), None)


def _path(document: Any, error: ErrorDetails) -> list[str | int]:
    """Returns where an error lies in the request, without the names of types that pydantic adds."""
    value, path = document, []
    for part in error["loc"]:
        within = isinstance(value, dict) and part in value
        if within or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
            path.append(part)
    if error["type"] == "missing":
        return [*path, error["loc"][-1]]
    field = error.get("ctx", {}).get("field")
    return path if field is None else [*path, field]


def _fit(found: tuple[list[str | int], ErrorDetails]) -> tuple[int, int, bool]:
    """Returns how far a value fits the type of an error: to which depth and index, and whether in its type."""
    path, error = found
    last = path[-1] if path else -1
    return len(path), last if isinstance(last, int) else -1, not error["type"].endswith("_type")


def _unknown(path: Sequence[str | int], holder: type[BaseModel]) -> ApiError:
    name = _joined(path)
    message = f"{name}: unknown or not supported; expected one of {', '.join(holder.model_fields)}"
    return ApiError(400, message, cut(str(path[0])), "unknown_parameter")


def _joined(path: Sequence[str | int]) -> str:
    return cut(".".join(map(str, path)))


def _shown(value: Any) -> str:
    return cut(json.dumps(value, ensure_ascii=False))

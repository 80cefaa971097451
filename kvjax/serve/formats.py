"""Fields of a request that the form of the content follows from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from .fields import Strict, refused

NAMES = {"name", "description", "schema", "strict"}


def _named(value: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(value.get("schema"), dict) or value.keys() - NAMES:
        raise ValueError
    return value


class ResponseFormat(Strict):
    """The form of the content.

    Attributes:
        type: "json_object" is any JSON object, and "json_schema" is JSON that a schema accepts.
        json_schema: the schema, always enforced.
    """

    type: Annotated[
        Literal["text", "json_object", "json_schema"], Field(description='"text", "json_object" or "json_schema"')
    ]
    json_schema: Annotated[
        Annotated[dict[str, Any], AfterValidator(_named)] | None,
        Field(description='with the type json_schema {"name": ..., "schema": {...}}, else null'),
    ] = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise refused("json_schema", "value")
        return self

    @property
    def schema_(self) -> dict[str, Any] | None:
        """The schema of the content; None for text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema["schema"]

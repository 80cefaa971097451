"""Types that fields of requests have in common, and in JSON's words what each accepts.

Every field has a description, which completes the sentence "expected ..." of an error.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


def refused(field: str, kind: Literal["value", "unknown"]) -> PydanticCustomError:
    """The error of a validator of an object about one of its fields."""
    return PydanticCustomError(kind, "refused", {"field": field})


class Strict(BaseModel):
    """Refuses values of other types, and unknown fields that ask for something: not null, false, zero or empty."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="after")
    def _known(self) -> Strict:
        for name, value in (self.model_extra or {}).items():
            if value:
                raise refused(name, "unknown")
        self.__pydantic_extra__ = None
        return self


def _nothing(value: Any) -> None:
    """Any value as none."""


def _whole(value: Any) -> Any:
    """JSON has one type of numbers, in which 8.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _by_token(value: dict[str, Any]) -> dict[str, float]:
    for name, bias in value.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not (is_number and name.isascii() and name.isdigit() and len(name) < 10):
            raise ValueError
    return value


Integer = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]

Most16 = Annotated[Annotated[Integer, Field(ge=1, le=16)] | None, Field(description="an integer from 1 to 16")]
Seed = Annotated[
    Annotated[Integer, Field(ge=-(2**63), lt=2**63)] | None, Field(description="an integer of 64 bits with a sign")
]
Whole = Annotated[Annotated[Integer, Field(ge=1, lt=2**31)] | None, Field(description="an integer of at least 1")]
TopK = Annotated[
    Annotated[Integer, Field(ge=-1, lt=2**31)] | None,
    Field(description="an integer of at least 1, or 0 or -1 for no limit"),
]
TopP = Annotated[Annotated[Number, Field(gt=0, le=1)] | None, Field(description="a number above 0 and at most 1")]
MinP = Annotated[Annotated[Number, Field(ge=0, le=1)] | None, Field(description="a number from 0 to 1")]
Temperature = Annotated[Annotated[Number, Field(ge=0, le=100)] | None, Field(description="a number from 0 to 100")]
Penalty = Annotated[Annotated[Number, Field(gt=0)] | None, Field(description="a number above 0")]
Flag = Annotated[bool | None, Field(description="true or false")]
String = Annotated[str | None, Field(description="a string")]
# Values that nobody reads are dropped, so that a request holds no memory for them while it waits.
Object = Annotated[dict[str, Any] | None, AfterValidator(_nothing), Field(description="an object")]
Ignored = Annotated[Any, AfterValidator(_nothing), Field(description="any value, which is ignored")]

Subtracted = Annotated[Annotated[Number, Field(ge=-2, le=2)] | None, Field(description="a number from -2 to 2")]
Bias = Annotated[
    Annotated[dict[str, Any], Field(max_length=300), AfterValidator(_by_token)] | None,
    Field(description="an object with at most 300 numbers from -100 to 100 by token id"),
]
Top = Annotated[Annotated[Integer, Field(ge=0, le=20)] | None, Field(description="an integer from 0 to 20")]

"""Maps RoPE from and to Hugging Face configs.

transformers 5 writes `rope_parameters`. Earlier versions write `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .fields import UnsupportedModelError, flag, integer, number, numbers, require, unsupported
from .rope import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, Rope, Scaling, YarnScaling


class ContextLengths(NamedTuple):
    """The context lengths of a config, in tokens: `max_position_embeddings`, and the length before extension."""

    extended: int
    original: int


def _linear(fields: Mapping[str, Any], context: ContextLengths) -> LinearScaling:
    return LinearScaling(number(fields, "factor"))


def _dynamic(fields: Mapping[str, Any], context: ContextLengths) -> DynamicScaling:
    return DynamicScaling(number(fields, "factor"), context.extended)


def _llama3(fields: Mapping[str, Any], context: ContextLengths) -> Llama3Scaling:
    low, high = number(fields, "low_freq_factor"), number(fields, "high_freq_factor")
    if not low < high:
        raise UnsupportedModelError(
            f"config field low_freq_factor={low!r} is not supported for rope_type='llama3'; accepted: a number below "
            f"high_freq_factor={high!r}"
        )
    return Llama3Scaling(number(fields, "factor"), low, high, context.original)


def _yarn(fields: Mapping[str, Any], context: ContextLengths) -> YarnScaling:
    factor = number(fields, "factor", context.extended / context.original)

    def growth(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        default = growth(number(fields, "mscale")) / growth(number(fields, "mscale_all_dim"))
    else:
        default = growth()
    return YarnScaling(
        factor,
        attention_factor=number(fields, "attention_factor", default),
        beta_fast=number(fields, "beta_fast", 32.0),
        beta_slow=number(fields, "beta_slow", 1.0),
        truncate=flag(fields, "truncate", True),
        original_max_position_embeddings=context.original,
    )


def _longrope(fields: Mapping[str, Any], context: ContextLengths) -> LongRopeScaling:
    if context.original < 2:
        raise unsupported(ORIGINAL, context.original, "an integer >= 2 for rope_type='longrope'")
    factor = number(fields, "factor", context.extended / context.original)
    default = math.sqrt(1 + math.log(factor) / math.log(context.original)) if factor > 1 else 1.0
    return LongRopeScaling(
        numbers(fields, "short_factor"),
        numbers(fields, "long_factor"),
        attention_factor=number(fields, "attention_factor", default),
        original_max_position_embeddings=context.original,
    )


class RopeType(NamedTuple):
    """The reader of a rope type, and the fields that it accepts beyond COMMON."""

    read: Callable[[Mapping[str, Any], ContextLengths], Scaling | None]
    fields: tuple[str, ...] = ()


ORIGINAL = "original_max_position_embeddings"
COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
ROPE_TYPES = {
    "default": RopeType(lambda fields, context: None),
    "linear": RopeType(_linear, ("factor",)),
    "dynamic": RopeType(_dynamic, ("factor",)),
    "llama3": RopeType(_llama3, ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)),
    "yarn": RopeType(
        _yarn,
        ("factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate", ORIGINAL),
    ),
    "longrope": RopeType(_longrope, ("factor", "attention_factor", "short_factor", "long_factor", ORIGINAL)),
}
ALIASES = {"su": "longrope"}  # the name in the first Phi-3 checkpoints


def rope_from_hf(hf: Mapping[str, Any], kinds: tuple[str, ...] = tuple(ROPE_TYPES), *, partial: bool = False) -> Rope:
    """Reads RoPE from either form of config. If a config has both, `rope_scaling` wins, as in transformers.

    A field that is null is absent, except that `truncate` is then false, as in transformers.

    Args:
        hf: the content of `config.json`.
        kinds: the rope types that the family supports.
        partial: whether the family supports `partial_rotary_factor` < 1.

    Raises:
        UnsupportedModelError: a rope type that is not in `kinds`, an unknown field of one, or an invalid value.
    """
    fields = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(fields, Mapping):
        raise unsupported("rope_scaling", fields, "a mapping")
    fields = {name: value for name, value in fields.items() if value is not None or name == "truncate"}
    if not partial:
        require(hf, "partial_rotary_factor", None, 1.0)
        require(fields, "partial_rotary_factor", 1.0)
    fraction = number(fields, "partial_rotary_factor", number(hf, "partial_rotary_factor", 1.0))
    if fraction > 1:
        raise unsupported("partial_rotary_factor", fraction, "a number in (0, 1]")
    theta = number(fields, "rope_theta", number(hf, "rope_theta", 10_000.0))
    named = fields.get("rope_type", fields.get("type", "default"))
    kind = ALIASES.get(named, named) if isinstance(named, str) else named
    if kind not in kinds:
        raise unsupported("rope_type", named, ", ".join(map(repr, kinds)))
    present = {name for name, value in fields.items() if value is not None}
    unknown = sorted(present - COMMON - set(ROPE_TYPES[kind].fields))
    if unknown:
        accepted = ", ".join(sorted(COMMON | set(ROPE_TYPES[kind].fields)))
        raise UnsupportedModelError(
            f"config field(s) {', '.join(unknown)} are not supported for rope_type={named!r}; accepted: {accepted}"
        )
    extended = integer(hf, "max_position_embeddings", 2048)
    original = integer(hf, ORIGINAL, integer(fields, ORIGINAL, extended))
    return Rope(theta, ROPE_TYPES[kind].read(fields, ContextLengths(extended, original)), fraction)


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """The inverse of `rope_from_hf`, in the form of transformers 5."""
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.partial_rotary_factor != 1:
        fields["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.scaling is not None:
        fields["rope_type"] = rope.scaling.rope_type
        own = dataclasses.asdict(rope.scaling)
        own.pop("max_position_embeddings", None)  # a field of the config itself
        own.pop("llama_4_scaling_beta", None)  # of one family
        fields |= {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
    return fields

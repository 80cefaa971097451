"""RoPE in Hugging Face configs: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .fields import UnsupportedModelError, flag, integer, number, numbers, refuse, require
from .rope import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, Rope, Scaling, YarnScaling


class Context(NamedTuple):
    """The two lengths of a config: now (`max_position_embeddings`), and before it was extended."""

    length: int
    original: int


def _linear(fields: Mapping[str, Any], context: Context) -> LinearScaling:
    return LinearScaling(number(fields, "factor"))


def _dynamic(fields: Mapping[str, Any], context: Context) -> DynamicScaling:
    return DynamicScaling(number(fields, "factor"), context.length)


def _llama3(fields: Mapping[str, Any], context: Context) -> Llama3Scaling:
    low, high = number(fields, "low_freq_factor"), number(fields, "high_freq_factor")
    if not low < high:
        raise UnsupportedModelError("rope type 'llama3' needs low_freq_factor < high_freq_factor")
    return Llama3Scaling(number(fields, "factor"), low, high, context.original)


def _yarn(fields: Mapping[str, Any], context: Context) -> YarnScaling:
    factor = number(fields, "factor", context.length / context.original)

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


def _longrope(fields: Mapping[str, Any], context: Context) -> LongRopeScaling:
    factor = number(fields, "factor", context.length / context.original)
    default = math.sqrt(1 + math.log(factor) / math.log(context.original)) if factor > 1 else 1.0
    return LongRopeScaling(
        numbers(fields, "short_factor"),
        numbers(fields, "long_factor"),
        attention_factor=number(fields, "attention_factor", default),
        original_max_position_embeddings=context.original,
    )


class Kind(NamedTuple):
    """How a rope type is read, and the fields that it may have beside those that all have."""

    read: Callable[[Mapping[str, Any], Context], Scaling | None]
    fields: tuple[str, ...] = ()


ORIGINAL = "original_max_position_embeddings"
COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
KINDS = {
    "default": Kind(lambda fields, context: None),
    "linear": Kind(_linear, ("factor",)),
    "dynamic": Kind(_dynamic, ("factor",)),
    "llama3": Kind(_llama3, ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL)),
    "yarn": Kind(
        _yarn,
        ("factor", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate", ORIGINAL),
    ),
    "longrope": Kind(_longrope, ("factor", "attention_factor", "short_factor", "long_factor", ORIGINAL)),
}
ALIASES = {"su": "longrope"}  # as the first Phi-3 files have it


def rope_from_hf(hf: Mapping[str, Any], kinds: tuple[str, ...] = tuple(KINDS), *, partial: bool = False) -> Rope:
    """Reads RoPE, of the types that a family knows, from either form of config.

    Where both forms stand in a file, `rope_scaling` wins, as in transformers. Raises UnsupportedModelError for a type
    or a field of it that is not implemented; rotating a part of each head is one, unless `partial`.
    """
    fields = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(fields, Mapping):
        raise refuse("rope_scaling", fields, "a mapping")
    if not partial:
        require(hf, "partial_rotary_factor", None, 1.0)
        require(fields, "partial_rotary_factor", None, 1.0)
    share = number(fields, "partial_rotary_factor", number(hf, "partial_rotary_factor", 1.0))
    if share > 1:
        raise refuse("partial_rotary_factor", share, "a number of up to 1")
    theta = number(fields, "rope_theta", number(hf, "rope_theta", 10_000.0))
    named = fields.get("rope_type", fields.get("type", "default"))
    kind = ALIASES.get(named, named) if isinstance(named, str) else named
    if kind not in kinds:
        raise refuse("rope_type", named, ", ".join(map(repr, kinds)))
    unknown = sorted(set(fields) - COMMON - set(KINDS[kind].fields))
    if unknown:
        raise UnsupportedModelError(f"config field(s) {', '.join(unknown)} are not supported for rope_type={named!r}")
    length = integer(hf, "max_position_embeddings", 2048)
    original = integer(hf, ORIGINAL, integer(fields, ORIGINAL, length))
    return Rope(theta, KINDS[kind].read(fields, Context(length, original)), share)


def rope_to_hf(rope: Rope) -> dict[str, Any]:
    """The inverse of `rope_from_hf`, as transformers 5 writes it."""
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.partial_rotary_factor != 1:
        fields["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.scaling is not None:
        fields["rope_type"] = rope.scaling.rope_type
        own = dataclasses.asdict(rope.scaling)
        own.pop("max_position_embeddings", None)  # stands in the config itself
        fields |= {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}
    return fields

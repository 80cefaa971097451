"""Gemma 3's text models (arXiv 2503.19786): Gemma 2 with norms of q and k, and another RoPE in layers with a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import gemma2, qwen2
from .config import DecoderConfig
from .fields import integer, require, unsupported
from .llama import weights as weights
from .rope_config import rope_from_hf, rope_to_hf

ARCHITECTURE = "Gemma3ForCausalLM"
UNUSED = (("rope_type", "default"), ("rope_theta", None))  # beside the kinds of layers of `rope_parameters`
FIELDS = (*gemma2.FIELDS, "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq")
OTHER = ("vision_tower.", "multi_modal_projector.")  # tensors that a text does not need
KINDS = ("default", "linear", "llama3", "yarn")  # of RoPE: those that do not depend on the length of a prompt

# The defaults of transformers for absent fields.
DEFAULTS = gemma2.DEFAULTS | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    require(hf, "attn_logit_softcapping", None)  # transformers ignores it
    period = 6 if hf.get("layer_types") is not None else integer(hf, "sliding_window_pattern", 6)
    old = {"rope_theta": hf.get("rope_theta") or 1e6, "rope_scaling": hf.get("rope_scaling")}
    local = {"rope_theta": hf.get("rope_local_base_freq") or 1e4, "rope_scaling": None}
    full, sliding = (rope_from_hf(hf | fields, KINDS) for fields in rope_by_kind(hf, old, local))
    return replace(gemma2.gemma(hf, ARCHITECTURE, period, full), window_rope=sliding, qk_norm=True)


def rope_by_kind(hf: Mapping[str, Any], full: dict[str, Any], sliding: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields of RoPE in the layers with full attention, and in those with a window.

    transformers 5 writes `rope_parameters` by kind of layer. `full` and `sliding` are the fields of earlier configs. As
    in transformers, a `rope_scaling` beside it replaces fields of the layers with full attention.
    """
    by_kind = hf.get("rope_parameters") or {}
    if isinstance(by_kind, Mapping) and qwen2.FULL in by_kind:  # transformers 5.0 adds fields of a flat mapping
        by_kind = {name: value for name, value in by_kind.items() if (name, value) not in UNUSED}
    if not isinstance(by_kind, Mapping) or set(by_kind) - {qwen2.FULL, qwen2.SLIDING}:
        raise unsupported("rope_parameters", by_kind, f"a mapping with {qwen2.FULL!r} and {qwen2.SLIDING!r}")
    given, scaling = by_kind.get(qwen2.FULL), full.get("rope_scaling")
    if isinstance(given, Mapping) and isinstance(scaling, Mapping):
        full, by_kind = full | {"rope_scaling": None}, {**by_kind, qwen2.FULL: {**given, **scaling}}
    old = {qwen2.FULL: full, qwen2.SLIDING: sliding}
    return [fields | {"rope_parameters": by_kind.get(kind)} for kind, fields in old.items()]


def by_kind_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """RoPE by kind of layer, as transformers 5 writes it."""
    return {qwen2.FULL: rope_to_hf(config.rope), qwen2.SLIDING: rope_to_hf(config.window_rope or config.rope)}


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    old = {"rope_local_base_freq": (config.window_rope or config.rope).theta}
    return gemma2.config_to_hf(config, ARCHITECTURE) | {"rope_parameters": by_kind_to_hf(config), **old}


def text_name(name: str, config: DecoderConfig) -> str | None:
    """Returns the name in `weights` of a published tensor, or as transformers 5 writes it; None for one of images."""
    own = name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
    return None if own.removeprefix("model.").startswith(OTHER) else own

"""Ministral 3: Mistral with YaRN, whose queries grow with their position beyond the original context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import mistral
from .config import DecoderConfig, base_config, base_hf_config
from .fields import number, require, unsupported
from .gemma3_text import text_name as text_name
from .llama import weights as weights
from .rope import Rope, YarnScaling
from .rope_config import rope_from_hf, rope_to_hf

ARCHITECTURE = "Ministral3ForCausalLM"
FIELDS = ("sliding_window", "layer_types")
BETA = "llama_4_scaling_beta"
# The defaults of transformers for absent fields.
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    require(hf, "attention_bias", None, False)
    return base_config(hf, ARCHITECTURE, mistral.same_windows(hf), _rope(hf))


def _rope(hf: Mapping[str, Any]) -> Rope:
    """Reads YaRN with the growth of queries, which is a field of the same mapping."""
    given = hf.get("rope_scaling") or hf.get("rope_parameters")
    given = ROPE if given is None else given
    if not isinstance(given, Mapping):
        raise unsupported("rope_parameters", given, "a mapping")
    fields = {name: value for name, value in dict(given).items() if name not in (BETA, "max_position_embeddings")}
    rope = rope_from_hf(dict(hf) | {"rope_parameters": fields, "rope_scaling": None}, ("yarn",))
    assert isinstance(rope.scaling, YarnScaling)
    return replace(rope, scaling=replace(rope.scaling, llama_4_scaling_beta=number(given, BETA)))


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope.scaling
    assert isinstance(scaling, YarnScaling)
    rope = rope_to_hf(config.rope) | {BETA: scaling.llama_4_scaling_beta}
    own = {"sliding_window": config.windows[0], "rope_parameters": rope, "rope_scaling": rope}
    return base_hf_config(config, ARCHITECTURE) | own

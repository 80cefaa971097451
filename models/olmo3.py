"""OLMo 3: OLMo 2 with a sliding window in three of four layers, whose RoPE is not extended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import olmo2, qwen2
from .config import DecoderConfig
from .gemma3_text import KINDS, by_kind_to_hf, rope_by_kind
from .llama import weights as weights
from .rope_config import rope_from_hf

ARCHITECTURE = "Olmo3ForCausalLM"
FIELDS = ("sliding_window", "layer_types")
DEFAULTS = olmo2.DEFAULTS | {"rope_theta": 500_000.0, "sliding_window": 4096}  # of transformers, for absent fields


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    windows = qwen2.periodic_windows(hf, 4)
    given = hf.get("rope_parameters")
    flat = given if isinstance(given, Mapping) and not {qwen2.FULL, qwen2.SLIDING} & given.keys() else {}
    if flat.get("rope_type") == "default":  # of all layers, as transformers 5.0 has it
        hf |= {"rope_theta": flat.get("rope_theta", hf["rope_theta"]), "rope_parameters": None}
    theta = {"rope_theta": hf["rope_theta"]}  # of all layers, as in transformers 4, which alone writes it
    fields = rope_by_kind(hf, theta | {"rope_scaling": hf.get("rope_scaling")}, theta | {"rope_scaling": None})
    full, sliding = (rope_from_hf(hf | own, KINDS) for own in fields)
    return replace(olmo2.olmo(hf, ARCHITECTURE, windows, full), window_rope=sliding)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    rope = {"rope_parameters": by_kind_to_hf(config)}
    return olmo2.config_to_hf(config, ARCHITECTURE) | qwen2.kinds_to_hf(config) | rope

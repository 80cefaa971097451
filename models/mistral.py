"""Mistral 7B (arXiv 2310.06825): Llama's weights, with an optional sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import integer, layer_count, require
from .gemma3_text import text_name as text_name
from .llama import weights as weights

ARCHITECTURE = "MistralForCausalLM"
FIELDS = ("sliding_window", "layer_types")

# The defaults of transformers for absent fields. An explicit null means no window, and one kv head per query head.
DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    require(hf, "attention_bias", None, False)
    return base_config(hf, ARCHITECTURE, windows=same_windows(hf))


def same_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of every layer, `sliding_window`. Raises UnsupportedModelError if `layer_types` differs."""
    window = None if hf["sliding_window"] is None else integer(hf, "sliding_window")
    layers = layer_count(hf)
    require(hf, "layer_types", None, ["full_attention" if window is None else "sliding_attention"] * layers)
    return (window,) * layers


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return base_hf_config(config, ARCHITECTURE) | {"sliding_window": config.windows[0]}

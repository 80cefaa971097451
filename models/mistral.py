"""Mistral 7B (arXiv 2310.06825): Llama's weights, with an optional sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config, require
from .llama import weights as weights


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    require(hf, "attention_bias", False)
    require(hf, "partial_rotary_factor", None, 1.0)
    return base_config(hf, windows=(hf.get("sliding_window"),) * int(hf.get("num_hidden_layers") or 0))


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return base_hf_config(config) | {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": config.windows[0],
    }

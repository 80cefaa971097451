"""Ministral 8B: Mistral with a sliding window in some layers only. Its first checkpoints call themselves `mistral`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import mistral, qwen2
from .config import DecoderConfig, base_config, base_hf_config
from .fields import require
from .llama import weights as weights

ARCHITECTURE = "MinistralForCausalLM"
FIELDS = ("sliding_window", "layer_types")


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = mistral.DEFAULTS | dict(hf)
    require(hf, "attention_bias", None, False)
    # Without `layer_types`, a window is in every layer.
    windows = qwen2.layer_windows(hf | {"use_sliding_window": True, "max_window_layers": 0})
    return base_config(hf, ARCHITECTURE, windows)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return base_hf_config(config, ARCHITECTURE) | qwen2.kinds_to_hf(config)

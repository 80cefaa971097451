"""Qwen3 (arXiv 2505.09388): Qwen2 with a norm on each q and k head, and a head size independent of the hidden size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import qwen2
from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag, integer
from .llama import weights as weights

ARCHITECTURE = "Qwen3ForCausalLM"
FIELDS = qwen2.FIELDS
DEFAULTS = qwen2.DEFAULTS | {"head_dim": 128}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    integer(hf, "head_dim")  # transformers gives a null no meaning
    bias = flag(hf, "attention_bias")
    config = base_config(hf, ARCHITECTURE, qwen2.layer_windows(hf))
    return replace(config, qk_norm=True, qkv_bias=bias, output_bias=bias)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    own = {"attention_bias": config.qkv_bias} | qwen2.windows_to_hf(config)
    return base_hf_config(config, ARCHITECTURE) | own

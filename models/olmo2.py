"""OLMo 2 (arXiv 2501.00656): Llama with norms after attention and MLP, and on all query and all key heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag, layer_count, require
from .llama import weights as weights

ARCHITECTURE = "Olmo2ForCausalLM"
FIELDS = ("sliding_window", "layer_types")
DEFAULTS = {"rms_norm_eps": 1e-5}  # of transformers, for absent fields


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    layers = layer_count(hf)
    for field, accepted in {"sliding_window": None, "layer_types": ["full_attention"] * layers}.items():
        require(hf, field, None, accepted)
    require(hf, "mlp_bias", None, False)
    bias = flag(hf, "attention_bias")
    return replace(
        base_config(hf, ARCHITECTURE, windows=(None,) * layers),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        joint_qk_norm=True,
        pre_norm=False,
        post_norm=True,
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return base_hf_config(config, ARCHITECTURE) | {"attention_bias": config.qkv_bias}

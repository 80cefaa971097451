"""GLM-4.5 (arXiv 2508.06471): grouped-query attention, RoPE on a half of each head, and the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import deepseek_v3
from .config import DecoderConfig, base_config, base_hf_config
from .deepseek_v3 import EXPERTS, first_layers, mixture_from_hf, mixture_to_hf, text_name
from .fields import flag, integer, layer_count, require
from .rope_config import rope_from_hf
from .weights import Weight

__all__ = ["EXPERTS", "text_name"]
ARCHITECTURE = "Glm4MoeForCausalLM"
FIELDS = (*deepseek_v3.MIXTURE, "use_qk_norm")
# The defaults of transformers for absent fields.
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    hf.setdefault("head_dim", integer(hf, "hidden_size") // integer(hf, "num_attention_heads"))
    require(hf, "sliding_window", None)
    windows, rope = (None,) * layer_count(hf), rope_from_hf(hf, partial=True)
    config = base_config(hf, ARCHITECTURE, windows, rope, computed=("use_qk_norm",))
    norm, mixture = flag(hf, "use_qk_norm"), mixture_from_hf(hf, first_layers(hf))
    return replace(config, qkv_bias=flag(hf, "attention_bias"), qk_norm=norm, mixture=mixture)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    assert config.mixture is not None
    own: dict[str, Any] = {"attention_bias": config.qkv_bias, "use_qk_norm": config.qk_norm}
    own |= {"partial_rotary_factor": config.rope.partial_rotary_factor}
    own |= {"first_k_dense_replace": len(config.mixture.dense_layers)}
    return base_hf_config(config, ARCHITECTURE) | mixture_to_hf(config.mixture) | own


def weights(config: DecoderConfig) -> list[Weight]:
    return deepseek_v3.with_experts(config)

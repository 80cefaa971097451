"""GLM-4 of 2025: Llama with norms on both sides, q, k and v biases, and RoPE on pairs of neighbouring channels.

RoPE rotates a half of each head. One tensor holds gate and up. Channels are put in the order of the other families when
weights are read, and back when they are written: the products of queries and keys do not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag
from .rope_config import rope_from_hf
from .weights import Weight

ARCHITECTURE = "Glm4ForCausalLM"
FIELDS = ("sliding_window", "layer_types")
# The defaults of transformers for absent fields.
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
NAMES = {  # by Llama's
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.up_proj": "mlp.gate_up_proj",
}
TURNED = ("query", "key", "query_bias", "key_bias")


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    config = base_config(hf, ARCHITECTURE, llama.no_windows(hf), rope_from_hf(hf, partial=True))
    return replace(config, qkv_bias=flag(hf, "attention_bias"), post_norm=True)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    own = {"attention_bias": config.qkv_bias, "partial_rotary_factor": config.rope.partial_rotary_factor}
    return base_hf_config(config, ARCHITECTURE) | own


def weights(config: DecoderConfig) -> list[Weight]:
    paired = config.rope.channels(config.head_dim)
    table = llama.renamed_weights(config, NAMES, llama.gate_up_rows(config.mlp_size))
    return [replace(one, paired=paired) if one.path.rpartition(".")[2] in TURNED else one for one in table]

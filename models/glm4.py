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
from .fields import flag, layer_count, require
from .rope_config import rope_from_hf
from .weights import FusedRows, Weight, linear_weights

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
NORMS = {  # by their names here
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    require(hf, "sliding_window", None)
    layers = layer_count(hf)
    require(hf, "layer_types", None, ["full_attention"] * layers)
    require(hf, "mlp_bias", None, False)
    config = base_config(hf, ARCHITECTURE, (None,) * layers, rope_from_hf(hf, partial=True))
    return replace(config, qkv_bias=flag(hf, "attention_bias"), post_norm=True)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    own = {"attention_bias": config.qkv_bias, "partial_rotary_factor": config.rope.partial_rotary_factor}
    return base_hf_config(config, ARCHITECTURE) | own


def weights(config: DecoderConfig) -> list[Weight]:
    F, paired = config.mlp_size, config.rope.channels(config.head_dim)
    fused = {"gate": FusedRows(0, F, 2 * F), "up": FusedRows(F, 2 * F, 2 * F)}
    table = []
    for weight in llama.weights(config):
        *_, part, last = ("", *weight.path.split("."))
        if part == "mlp" and last in fused:
            layer = weight.name.removesuffix(f".{last}_proj.weight")
            table += linear_weights(weight.path, f"{layer}.gate_up_proj", rows=fused[last])
        elif part in NORMS:
            layer = weight.path.removesuffix(f".{part}.scale")
            table.append(replace(weight, name=f"model.{layer}.{NORMS[part]}.weight"))
        else:
            turned = last in ("query", "key", "query_bias", "key_bias")
            table.append(replace(weight, paired=paired) if turned else weight)
    return table

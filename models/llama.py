"""Llama 2, 3 and 3.1 (arXiv 2307.09288, 2407.21783): config mapping and tensor names in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag, layer_count, require
from .weights import Weight, linear_weights

ARCHITECTURE = "LlamaForCausalLM"


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    require(hf, "sliding_window", None)
    layers = layer_count(hf)
    require(hf, "layer_types", None, ["full_attention"] * layers)
    bias = flag(hf, "attention_bias")
    return replace(
        base_config(hf, ARCHITECTURE, windows=(None,) * layers),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(hf, "mlp_bias"),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    own = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    return base_hf_config(config, ARCHITECTURE) | own


def weights(config: DecoderConfig) -> list[Weight]:
    """The weights of Llama, Mistral and Qwen. The config decides which biases and norms are among them."""
    table = [
        Weight("embed", "model.embed_tokens.weight", "embedding"),
        Weight("norm.scale", "model.norm.weight", "vector"),
    ]
    if not config.tie_embeddings:
        table.append(Weight("unembed", "lm_head.weight", "linear"))
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        table += [
            Weight(f"{ours}.attention_norm.scale", f"{theirs}.input_layernorm.weight", "vector"),
            *linear_weights(f"{ours}.attention.query", f"{theirs}.self_attn.q_proj", config.qkv_bias),
            *linear_weights(f"{ours}.attention.key", f"{theirs}.self_attn.k_proj", config.qkv_bias),
            *linear_weights(f"{ours}.attention.value", f"{theirs}.self_attn.v_proj", config.qkv_bias),
            *linear_weights(
                f"{ours}.attention.output", f"{theirs}.self_attn.o_proj", config.output_bias, layout="linear_from_heads"
            ),
            Weight(f"{ours}.mlp_norm.scale", f"{theirs}.post_attention_layernorm.weight", "vector"),
            *linear_weights(f"{ours}.mlp.gate", f"{theirs}.mlp.gate_proj", config.mlp_bias),
            *linear_weights(f"{ours}.mlp.up", f"{theirs}.mlp.up_proj", config.mlp_bias),
            *linear_weights(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", config.mlp_bias),
        ]
        if config.qk_norm:
            table += [
                Weight(f"{ours}.attention.query_norm.scale", f"{theirs}.self_attn.q_norm.weight", "vector"),
                Weight(f"{ours}.attention.key_norm.scale", f"{theirs}.self_attn.k_norm.weight", "vector"),
            ]
    return table

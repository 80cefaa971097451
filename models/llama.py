"""Llama 2, 3 and 3.1 (arXiv 2307.09288, 2407.21783): what is particular to the family in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag, integer, require
from .weights import Rows, Weight

ARCHITECTURE = "LlamaForCausalLM"


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    require(hf, "sliding_window", None)
    layers = integer(hf, "num_hidden_layers")
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


def linear(path: str, name: str, bias: bool = False, rows: Rows | None = None) -> list[Weight]:
    """A linear map, and its bias if it has one."""
    weight = Weight(path, f"{name}.weight", True, rows)
    return [weight, Weight(f"{path}_bias", f"{name}.bias", False, rows)] if bias else [weight]


def weights(config: DecoderConfig) -> list[Weight]:
    """The names of Llama, Mistral and Qwen; what a family does not have its config does not ask for."""
    table = [Weight("embed", "model.embed_tokens.weight", False), Weight("norm.scale", "model.norm.weight", False)]
    if not config.tie_embeddings:
        table.append(Weight("unembed", "lm_head.weight", True))
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        table += [
            Weight(f"{ours}.attention_norm.scale", f"{theirs}.input_layernorm.weight", False),
            *linear(f"{ours}.attention.query", f"{theirs}.self_attn.q_proj", config.qkv_bias),
            *linear(f"{ours}.attention.key", f"{theirs}.self_attn.k_proj", config.qkv_bias),
            *linear(f"{ours}.attention.value", f"{theirs}.self_attn.v_proj", config.qkv_bias),
            *linear(f"{ours}.attention.output", f"{theirs}.self_attn.o_proj", config.output_bias),
            Weight(f"{ours}.mlp_norm.scale", f"{theirs}.post_attention_layernorm.weight", False),
            *linear(f"{ours}.mlp.gate", f"{theirs}.mlp.gate_proj", config.mlp_bias),
            *linear(f"{ours}.mlp.up", f"{theirs}.mlp.up_proj", config.mlp_bias),
            *linear(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj", config.mlp_bias),
        ]
        if config.qk_norm:
            table += [
                Weight(f"{ours}.attention.query_norm.scale", f"{theirs}.self_attn.q_norm.weight", False),
                Weight(f"{ours}.attention.key_norm.scale", f"{theirs}.self_attn.k_norm.weight", False),
            ]
    return table

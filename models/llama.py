"""Llama 2, 3 and 3.1 (arXiv 2307.09288, 2407.21783): what is particular to the family in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import integer, require
from .weights import Weight

ARCHITECTURE = "LlamaForCausalLM"


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    require(hf, "attention_bias", False)
    require(hf, "mlp_bias", False)
    require(hf, "sliding_window", None)
    layers = integer(hf, "num_hidden_layers")
    require(hf, "layer_types", None, ["full_attention"] * layers)
    return base_config(hf, ARCHITECTURE, windows=(None,) * layers)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return base_hf_config(config, ARCHITECTURE) | {"attention_bias": False, "mlp_bias": False}


def weights(config: DecoderConfig) -> list[Weight]:
    table = [Weight("embed", "model.embed_tokens.weight", False), Weight("norm.scale", "model.norm.weight", False)]
    if not config.tie_embeddings:
        table.append(Weight("unembed", "lm_head.weight", True))
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        table += [
            Weight(f"{ours}.attention_norm.scale", f"{theirs}.input_layernorm.weight", False),
            Weight(f"{ours}.attention.query", f"{theirs}.self_attn.q_proj.weight", True),
            Weight(f"{ours}.attention.key", f"{theirs}.self_attn.k_proj.weight", True),
            Weight(f"{ours}.attention.value", f"{theirs}.self_attn.v_proj.weight", True),
            Weight(f"{ours}.attention.output", f"{theirs}.self_attn.o_proj.weight", True),
            Weight(f"{ours}.mlp_norm.scale", f"{theirs}.post_attention_layernorm.weight", False),
            Weight(f"{ours}.mlp.gate", f"{theirs}.mlp.gate_proj.weight", True),
            Weight(f"{ours}.mlp.up", f"{theirs}.mlp.up_proj.weight", True),
            Weight(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj.weight", True),
        ]
    return table

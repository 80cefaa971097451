"""InternLM2 and InternLM2.5 (arXiv 2403.17297): Llama with its own tensor names, and q, k and v in one tensor.

The rows of that tensor are, for each kv head, its G query heads, its key head and its value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag, integer, layer_count, require
from .rope_config import rope_from_hf
from .weights import FusedRows, Weight, linear_weights

ARCHITECTURE = "InternLM2ForCausalLM"
FIELDS = ("sliding_window", "layer_types", "bias")


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    for field in ("attention_bias", "mlp_bias"):
        require(hf, field, None, False)
    require(hf, "sliding_window", None)
    layers = layer_count(hf)
    require(hf, "layer_types", None, ["full_attention"] * layers)
    require(hf, "head_dim", None, integer(hf, "hidden_size") // integer(hf, "num_attention_heads"))
    bias = flag(hf, "bias", True)
    rope = rope_from_hf(hf, ("default", "linear", "dynamic"))
    config = base_config(hf, ARCHITECTURE, windows=(None,) * layers, rope=rope)
    return replace(config, qkv_bias=bias, output_bias=bias)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Writes the fields that the family's own code reads. It knows neither `rope_parameters` nor `head_dim`."""
    scaling = config.rope.scaling
    hf = base_hf_config(config, ARCHITECTURE)
    del hf["rope_parameters"], hf["head_dim"]
    if scaling is not None:
        hf["rope_scaling"] = {"type": scaling.rope_type, "factor": hf["rope_scaling"]["factor"]}
    return hf | {"bias": config.qkv_bias}


def weights(config: DecoderConfig) -> list[Weight]:
    table = [
        Weight("embed", "model.tok_embeddings.weight", "embedding"),
        Weight("norm.scale", "model.norm.weight", "vector"),
    ]
    if not config.tie_embeddings:
        table.append(Weight("unembed", "output.weight", "linear"))
    keys = config.group * config.head_dim
    values = keys + config.head_dim
    qkv = values + config.head_dim
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        fused, bias = f"{theirs}.attention.wqkv", config.qkv_bias
        table += [
            Weight(f"{ours}.attention_norm.scale", f"{theirs}.attention_norm.weight", "vector"),
            *linear_weights(f"{ours}.attention.query", fused, bias, FusedRows(0, keys, qkv)),
            *linear_weights(f"{ours}.attention.key", fused, bias, FusedRows(keys, values, qkv)),
            *linear_weights(f"{ours}.attention.value", fused, bias, FusedRows(values, qkv, qkv)),
            *linear_weights(
                f"{ours}.attention.output", f"{theirs}.attention.wo", config.output_bias, layout="linear_from_heads"
            ),
            Weight(f"{ours}.mlp_norm.scale", f"{theirs}.ffn_norm.weight", "vector"),
            *linear_weights(f"{ours}.mlp.gate", f"{theirs}.feed_forward.w1"),
            *linear_weights(f"{ours}.mlp.up", f"{theirs}.feed_forward.w3"),
            *linear_weights(f"{ours}.mlp.down", f"{theirs}.feed_forward.w2"),
        ]
    return table

"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama with fused tensors, LongRoPE and partial rotation.

One tensor holds q, k and v, another gate and up. RoPE may rotate a part of each head only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import require
from .mistral import same_windows
from .rope import LongRopeScaling
from .rope_config import rope_from_hf
from .weights import FusedRows, Weight, linear_weights

ARCHITECTURE = "Phi3ForCausalLM"
FIELDS = ("sliding_window", "layer_types", "full_attn_mod", "interpolate_factor")

# The defaults of transformers for absent fields.
DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    for field in ("attention_bias", "mlp_bias"):
        require(hf, field, None, False)
    for field in ("full_attn_mod", "interpolate_factor"):
        require(hf, field, None, 1)
    windows = same_windows(hf)
    rope = rope_from_hf(hf, ("default", "longrope"), partial=True)
    return base_config(hf, ARCHITECTURE, windows=windows, rope=rope)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope.scaling
    trained = scaling.original_max_position_embeddings if isinstance(scaling, LongRopeScaling) else config.max_positions
    return base_hf_config(config, ARCHITECTURE) | {
        "sliding_window": config.windows[0],
        "original_max_position_embeddings": trained,
        "partial_rotary_factor": config.rope.partial_rotary_factor,
    }


def weights(config: DecoderConfig) -> list[Weight]:
    table = [
        Weight("embed", "model.embed_tokens.weight", "embedding"),
        Weight("norm.scale", "model.norm.weight", "vector"),
    ]
    if not config.tie_embeddings:
        table.append(Weight("unembed", "lm_head.weight", "linear"))
    keys = config.num_heads * config.head_dim
    values = keys + config.num_kv_heads * config.head_dim
    qkv, gate_up = values + config.num_kv_heads * config.head_dim, 2 * config.mlp_size
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        table += [
            Weight(f"{ours}.attention_norm.scale", f"{theirs}.input_layernorm.weight", "vector"),
            *linear_weights(f"{ours}.attention.query", f"{theirs}.self_attn.qkv_proj", rows=FusedRows(0, keys, qkv)),
            *linear_weights(f"{ours}.attention.key", f"{theirs}.self_attn.qkv_proj", rows=FusedRows(keys, values, qkv)),
            *linear_weights(
                f"{ours}.attention.value", f"{theirs}.self_attn.qkv_proj", rows=FusedRows(values, qkv, qkv)
            ),
            *linear_weights(f"{ours}.attention.output", f"{theirs}.self_attn.o_proj", layout="linear_from_heads"),
            Weight(f"{ours}.mlp_norm.scale", f"{theirs}.post_attention_layernorm.weight", "vector"),
            *linear_weights(
                f"{ours}.mlp.gate", f"{theirs}.mlp.gate_up_proj", rows=FusedRows(0, config.mlp_size, gate_up)
            ),
            *linear_weights(
                f"{ours}.mlp.up", f"{theirs}.mlp.gate_up_proj", rows=FusedRows(config.mlp_size, gate_up, gate_up)
            ),
            *linear_weights(f"{ours}.mlp.down", f"{theirs}.mlp.down_proj"),
        ]
    return table

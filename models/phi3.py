"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219, 2412.08905): Llama with fused tensors, LongRoPE and partial rotation.

One tensor holds q, k and v, another gate and up. RoPE may rotate a part of each head only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import llama
from .config import DecoderConfig, base_config, base_hf_config
from .fields import require
from .mistral import same_windows
from .rope import LongRopeScaling
from .rope_config import rope_from_hf
from .weights import FusedRows, Weight

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
    require(hf, "attention_bias", None, False)
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
    keys = config.num_heads * config.head_dim
    values = keys + config.num_kv_heads * config.head_dim
    qkv = values + config.num_kv_heads * config.head_dim
    attention = {
        "self_attn.q_proj": FusedRows(0, keys, qkv),
        "self_attn.k_proj": FusedRows(keys, values, qkv),
        "self_attn.v_proj": FusedRows(values, qkv, qkv),
    }
    mlp = llama.gate_up_rows(config.mlp_size)
    names = dict.fromkeys(attention, "self_attn.qkv_proj") | dict.fromkeys(mlp, "mlp.gate_up_proj")
    return llama.renamed_weights(config, names, attention | mlp)

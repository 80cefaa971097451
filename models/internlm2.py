"""InternLM2 and InternLM2.5 (arXiv 2403.17297): Llama with its own tensor names, and q, k and v in one tensor.

The rows of that tensor are, for each kv head, its G query heads, its key head and its value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama
from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag, integer, require
from .rope_config import rope_from_hf
from .weights import FusedRows, Weight

ARCHITECTURE = "InternLM2ForCausalLM"
FIELDS = ("sliding_window", "layer_types", "bias")
NAMES = {  # by Llama's
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    require(hf, "attention_bias", None, False)
    windows = llama.no_windows(hf)
    require(hf, "head_dim", None, integer(hf, "hidden_size") // integer(hf, "num_attention_heads"))
    bias = flag(hf, "bias", True)
    rope = rope_from_hf(hf, ("default", "linear", "dynamic"))
    config = base_config(hf, ARCHITECTURE, windows, rope)
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
    keys = config.group * config.head_dim
    values = keys + config.head_dim
    qkv = values + config.head_dim
    rows = {
        "self_attn.q_proj": FusedRows(0, keys, qkv),
        "self_attn.k_proj": FusedRows(keys, values, qkv),
        "self_attn.v_proj": FusedRows(values, qkv, qkv),
    }
    return llama.renamed_weights(config, NAMES | dict.fromkeys(rows, "attention.wqkv"), rows)

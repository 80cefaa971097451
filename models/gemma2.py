"""Gemma 2 (arXiv 2408.00118): soft caps, norms on both sides of attention and MLP, windows in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import qwen2
from .config import ACTIVATIONS, DecoderConfig, base_config, base_hf_config
from .fields import flag, integer, number, require
from .llama import weights as weights
from .rope import Rope

ARCHITECTURE = "Gemma2ForCausalLM"
# transformers reads no `sliding_window_size`, which the first checkpoints have.
FIELDS = ("sliding_window", "layer_types", "sliding_window_size")
CAPS = {"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"}
COMPUTED = (*CAPS, "query_pre_attn_scalar", "hidden_act", "hidden_activation")

# The defaults of transformers for absent fields. A null means no cap.
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    return gemma(hf, ARCHITECTURE, period=2)


def gemma(hf: dict[str, Any], architecture: str, period: int, rope: Rope | None = None) -> DecoderConfig:
    """Maps what Gemma 2 and 3 have in common. `hf` has defaults for all absent fields but `layer_types`."""
    for field in ("hidden_act", "hidden_activation"):  # transformers computes the second, whatever the first says
        require(hf, field, None, *ACTIVATIONS["gelu_tanh"], *(("gelu",) if field == "hidden_act" else ()))
    windows = qwen2.periodic_windows(hf, period)
    caps: dict[str, Any] = {ours: number(hf, theirs) for theirs, ours in CAPS.items() if hf[theirs] is not None}
    bias = flag(hf, "attention_bias")
    config = base_config(hf, architecture, windows, rope, COMPUTED)
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        post_norm=True,
        unit_offset_norms=True,
        activation="gelu_tanh",
        attention_scale=integer(hf, "query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=config.hidden_size**0.5,
        **caps,
    )


def config_to_hf(config: DecoderConfig, architecture: str = ARCHITECTURE) -> dict[str, Any]:
    own = qwen2.kinds_to_hf(config)
    return base_hf_config(config, architecture) | {
        "hidden_activation": ACTIVATIONS[config.activation][0],
        "query_pre_attn_scalar": round(config.scale**-2),
        "attention_bias": config.qkv_bias,
        "sliding_window": own["sliding_window"] or DEFAULTS["sliding_window"],  # transformers needs one in any case
        "layer_types": own["layer_types"],
        **{theirs: getattr(config, ours) for theirs, ours in CAPS.items()},
    }

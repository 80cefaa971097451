"""gpt-oss (arXiv 2508.10925): attention sinks, windows in every second layer, and experts with biases and clamps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import llama, qwen2
from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag, number, require, unsupported
from .mixtral import COMPUTED, expert_counts
from .mixture import Mixture
from .rope_config import rope_from_hf
from .stacked import StackedWeight
from .weights import FusedRows, Weight, linear_weights

ARCHITECTURE = "GptOssForCausalLM"
# transformers reads neither `experts_per_token` nor `initial_context_length`, which the checkpoints have.
FIELDS = ("sliding_window", "layer_types", "num_experts_per_tok", "experts_per_token", "initial_context_length")
ALPHA = 1.702  # of quick_gelu, the activation of gates

# The defaults of transformers for absent fields. An explicit null means one kv head per query head, and no window.
DEFAULTS = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": ALPHA,
    "swiglu_limit": 7.0,
    "attention_bias": True,
}
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
        hf["rope_parameters"] = ROPE
    require(hf, "swiglu_alpha", ALPHA)
    stored = hf.get("quantization_config")
    if stored is not None and not (isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4"):
        raise unsupported("quantization_config", stored, "none, or one with quant_method='mxfp4'")
    windows = qwen2.periodic_windows(hf, 2)
    computed = (*COMPUTED, "quantization_config", "swiglu_alpha", "swiglu_limit")
    config = base_config(hf, ARCHITECTURE, windows, rope_from_hf(hf), computed)
    experts, per_token = expert_counts(hf, "num_local_experts")
    bias = flag(hf, "attention_bias")
    limit = number(hf, "swiglu_limit")
    return replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        activation="quick_gelu",
        attention_sinks=True,
        mixture=Mixture(experts, per_token, config.mlp_size, biased=True, limit=limit),
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    assert config.mixture is not None
    own = qwen2.kinds_to_hf(config)
    return base_hf_config(config, ARCHITECTURE) | {
        "hidden_act": "silu",  # transformers computes its own activation, whatever this says
        "attention_bias": config.qkv_bias,
        "sliding_window": own["sliding_window"] or DEFAULTS["sliding_window"],
        "layer_types": own["layer_types"],
        "num_local_experts": config.mixture.experts,
        "num_experts_per_tok": config.mixture.per_token,
        "swiglu_alpha": ALPHA,
        "swiglu_limit": config.mixture.limit,
    }


def weights(config: DecoderConfig) -> list[Weight]:
    """The weights of Llama, with sinks, and with the experts of a layer in one tensor per matrix."""
    table = [weight for weight in llama.weights(config) if ".mlp." not in weight.path]
    gate, up = FusedRows(0, 1, 2), FusedRows(1, 2, 2)
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        table.append(Weight(f"{ours}.attention.sinks", f"{theirs}.self_attn.sinks", "vector"))
        table += linear_weights(f"{ours}.experts.router", f"{theirs}.mlp.router", bias=True)
        for kind in ("", "_bias"):
            table += [
                StackedWeight(f"{ours}.experts.gate{kind}", f"{theirs}.mlp.experts.gate_up_proj{kind}", rows=gate),
                StackedWeight(f"{ours}.experts.up{kind}", f"{theirs}.mlp.experts.gate_up_proj{kind}", rows=up),
                StackedWeight(f"{ours}.experts.down{kind}", f"{theirs}.mlp.experts.down_proj{kind}"),
            ]
    return table

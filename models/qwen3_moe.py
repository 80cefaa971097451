"""Qwen3 with experts (arXiv 2505.09388): Qwen3 with a mixture of experts in all or some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import qwen2
from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag, integer, layer_count, unsupported
from .mistral import same_windows
from .mixtral import COMPUTED, ExpertNames, expert_counts, weights_named
from .mixture import Mixture
from .weights import Weight

ARCHITECTURE = "Qwen3MoeForCausalLM"
MIXTURE = ("num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
FIELDS = (*qwen2.FIELDS, *MIXTURE)
EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")

# The defaults of transformers for absent fields. An explicit null means no window, and one kv head per query head.
DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    # transformers writes `num_local_experts`, and published configs have `num_experts`.
    counted = "num_local_experts" if hf.get("num_local_experts") is not None else "num_experts"
    hf = DEFAULTS | {counted: 128} | dict(hf)
    window = hf["sliding_window"] if flag(hf, "use_sliding_window") else None
    bias, windows = flag(hf, "attention_bias"), same_windows(hf | {"sliding_window": window})
    experts, per_token = expert_counts(hf, counted)
    dense = dense_layers(hf)
    size, normalized = integer(hf, "moe_intermediate_size"), flag(hf, "norm_topk_prob")
    mixture = Mixture(experts, per_token, size, normalized, dense)
    config = base_config(hf, ARCHITECTURE, windows, computed=COMPUTED)
    return replace(config, qk_norm=True, qkv_bias=bias, output_bias=bias, mixture=mixture)


def dense_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Reads which layers have an MLP: those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th layer."""
    layers, named, step = layer_count(hf), hf.get("mlp_only_layers") or [], integer(hf, "decoder_sparse_step", 1)
    if not isinstance(named, list) or not all(type(layer) is int and 0 <= layer < layers for layer in named):
        raise unsupported("mlp_only_layers", named, f"a list of layers in 0 .. {layers - 1}")
    return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    assert config.mixture is not None
    return base_hf_config(config, ARCHITECTURE) | {
        "attention_bias": config.qkv_bias,
        "use_sliding_window": config.windows[0] is not None,
        "sliding_window": config.windows[0],
        "num_experts": config.mixture.experts,
        "num_experts_per_tok": config.mixture.per_token,
        "moe_intermediate_size": config.mixture.size,
        "norm_topk_prob": config.mixture.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.mixture.dense_layers),
    }


def weights(config: DecoderConfig) -> list[Weight]:
    return weights_named(config, EXPERTS)

"""GLM-4.7-Flash: DeepSeek-V3 with other sizes, and a list of the layers that have experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import deepseek_v3
from .config import DecoderConfig
from .deepseek_v3 import EXPERTS, config_over_latents, latents_to_hf, mixture_from_hf, mixture_to_hf, text_name, weights
from .fields import layer_count, unsupported

__all__ = ["EXPERTS", "text_name", "weights"]
ARCHITECTURE = "Glm4MoeLiteForCausalLM"
DENSE, SPARSE = "dense", "sparse"
FIELDS = (*deepseek_v3.FIELDS, "mlp_layer_types")
# The defaults of transformers for absent fields. An explicit null of `q_lora_rank` means no latent of queries.
SIZES = deepseek_v3.SIZES | {"unrotated": ("qk_nope_head_dim", 192), "value": ("v_head_dim", 256)}
DEFAULTS = {
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    return replace(config_over_latents(hf, ARCHITECTURE, SIZES), mixture=mixture_from_hf(hf, dense_layers(hf)))


def dense_layers(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Reads which layers have an MLP in place of experts, by default the first. Raises UnsupportedModelError."""
    layers, kinds = layer_count(hf), hf.get("mlp_layer_types")
    if kinds is None:
        kinds = [DENSE] + [SPARSE] * (layers - 1)
    if not isinstance(kinds, list) or len(kinds) != layers or not {*map(str, kinds)} <= {DENSE, SPARSE}:
        raise unsupported("mlp_layer_types", kinds, f"{layers} of {DENSE!r} and {SPARSE!r}")
    return tuple(i for i, kind in enumerate(kinds) if kind == DENSE)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    assert config.mixture is not None
    kinds = [SPARSE if config.has_experts(i) else DENSE for i in range(config.num_layers)]
    return latents_to_hf(config, ARCHITECTURE) | mixture_to_hf(config.mixture) | {"mlp_layer_types": kinds}

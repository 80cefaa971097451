"""DeepSeek-V2-Lite (arXiv 2405.04434): attention over latents, and experts whose shares are a softmax.

Larger models of the family choose experts among those of some groups, which is not implemented.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import deepseek_v3
from .config import DecoderConfig
from .deepseek_v3 import (
    EXPERTS,
    config_over_latents,
    experts_to_hf,
    first_layers,
    latents_to_hf,
    text_name,
    weights,
)
from .fields import integer, require
from .mixtral import expert_counts
from .mixture import Mixture

__all__ = ["EXPERTS", "text_name", "weights"]
ARCHITECTURE = "DeepseekV2ForCausalLM"
FIELDS = tuple(field for field in deepseek_v3.FIELDS if field != "rope_interleave")
# The defaults of transformers for absent fields. An explicit null of `q_lora_rank` means no latent of queries.
DEFAULTS = {
    "q_lora_rank": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    require(hf, "scoring_func", None, "softmax")
    require(hf, "topk_method", None, "greedy")
    require(hf, "routed_scaling_factor", None, 1.0)
    require(hf, "norm_topk_prob", None, False)
    require(hf, "n_group", None, 1)
    require(hf, "topk_group", None, 1)
    experts, per_token = expert_counts(hf, "n_routed_experts")
    size = integer(hf, "moe_intermediate_size")
    mixture = Mixture(
        experts,
        per_token,
        size,
        normalized=False,
        dense_layers=first_layers(hf),
        shared=size * integer(hf, "n_shared_experts"),
        shared_gate=False,
    )
    return replace(config_over_latents(hf, ARCHITECTURE), mixture=mixture)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    mixture, written = config.mixture, latents_to_hf(config, ARCHITECTURE)
    assert mixture is not None
    del written["rope_interleave"]
    return written | experts_to_hf(mixture) | {"first_k_dense_replace": len(mixture.dense_layers)}

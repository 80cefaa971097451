"""The text decoder of Qwen3.5 with experts: a mixture in every layer, beside an expert that all tokens share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import qwen3_5_text, qwen3_moe
from .config import DecoderConfig
from .fields import flag, integer, require
from .hybrid import Named, hybrid_weights
from .mixtral import expert_counts, expert_weights
from .mixture import Mixture
from .qwen3_5_text import projections, text_name
from .qwen3_moe import EXPERTS
from .weights import Weight, mlp_weights

__all__ = ["EXPERTS", "text_name"]
ARCHITECTURE = "Qwen3_5MoeForCausalLM"
COMPUTED = ("num_experts",)
FIELDS = (*qwen3_5_text.FIELDS, *qwen3_moe.MIXTURE, "shared_expert_intermediate_size")
# The defaults of transformers for absent fields.
DEFAULTS = {
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    require(hf, "norm_topk_prob", True)
    mixture = mixture_from_hf(hf)
    sizes = {"intermediate_size": mixture.shared}  # of MLPs, which no layer has
    return replace(qwen3_5_text.config_from_hf(dict(hf) | sizes, ARCHITECTURE, COMPUTED), mixture=mixture)


def mixture_from_hf(hf: Mapping[str, Any]) -> Mixture:
    """Reads the experts, which all layers have. Raises UnsupportedModelError."""
    require(hf, "decoder_sparse_step", None, 1)
    require(hf, "mlp_only_layers", None, [])
    experts, per_token = expert_counts(hf, "num_experts")
    size, shared = integer(hf, "moe_intermediate_size"), integer(hf, "shared_expert_intermediate_size")
    return Mixture(experts, per_token, size, flag(hf, "norm_topk_prob", True), shared=shared)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    written = qwen3_5_text.config_to_hf(config, ARCHITECTURE) | mixture_to_hf(config)
    return {field: value for field, value in written.items() if field != "intermediate_size"}


def mixture_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `mixture_from_hf`, without `norm_topk_prob`."""
    assert config.mixture is not None
    return {
        "num_experts": config.mixture.experts,
        "num_experts_per_tok": config.mixture.per_token,
        "moe_intermediate_size": config.mixture.size,
        "shared_expert_intermediate_size": config.mixture.shared,
    }


def weights(config: DecoderConfig) -> list[Weight]:
    return hybrid_weights(config, projections, feed_forward(config))


def feed_forward(config: DecoderConfig) -> Named:
    """The weights of a layer's experts, and of the one that all tokens share."""

    def named(ours: str, theirs: str) -> list[Weight]:
        shared = f"{theirs}.mlp.shared_expert"
        return [
            *expert_weights(config, f"{ours}.experts", f"{theirs}.mlp", EXPERTS),
            *mlp_weights(f"{ours}.shared", shared),
            Weight(f"{ours}.shared.share", f"{shared}_gate.weight", "linear"),
        ]

    return named

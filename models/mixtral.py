"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from . import llama
from .config import DecoderConfig, base_config, base_hf_config
from .fields import UnsupportedModelError, integer, require
from .mistral import same_windows
from .mixture import Mixture
from .weights import Weight, linear_weights

ARCHITECTURE = "MixtralForCausalLM"
FIELDS = ("sliding_window", "layer_types", "num_experts_per_tok")
COMPUTED = ("num_experts", "num_local_experts")

# The defaults of transformers for absent fields. An explicit null means no window, and one kv head per query head.
DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


class ExpertNames(NamedTuple):
    """The names of a layer's experts in published checkpoints: the block of experts and router, and three matrices."""

    block: str
    gate: str
    up: str
    down: str


EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    require(hf, "attention_bias", None, False)
    config = base_config(hf, ARCHITECTURE, windows=same_windows(hf), computed=COMPUTED)
    experts, per_token = expert_counts(hf, "num_local_experts")
    return replace(config, mixture=Mixture(experts, per_token, config.mlp_size))


def expert_counts(hf: Mapping[str, Any], field: str, per_token_field: str = "num_experts_per_tok") -> tuple[int, int]:
    """Reads the number of experts, and of experts per token, from these fields. Raises UnsupportedModelError."""
    experts, per_token = integer(hf, field), integer(hf, per_token_field)
    if per_token > experts:
        raise UnsupportedModelError(f"config field {per_token_field}={per_token} is more than {field}={experts}")
    return experts, per_token


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    assert config.mixture is not None
    return base_hf_config(config, ARCHITECTURE) | {
        "sliding_window": config.windows[0],
        "num_local_experts": config.mixture.experts,
        "num_experts_per_tok": config.mixture.per_token,
    }


def weights(config: DecoderConfig) -> list[Weight]:
    return weights_named(config, EXPERTS)


def weights_named(config: DecoderConfig, names: ExpertNames) -> list[Weight]:
    """The weights of Llama, with experts under the names of a family in the layers that have them."""
    mixed = tuple(f"layers.{i}.mlp." for i in range(config.num_layers) if config.has_experts(i))
    table = [weight for weight in llama.weights(config) if not weight.path.startswith(mixed)]
    for i in range(config.num_layers):
        if config.has_experts(i):
            table += expert_weights(config, f"layers.{i}.experts", f"model.layers.{i}.{names.block}", names)
    return table


def expert_weights(config: DecoderConfig, ours: str, theirs: str, names: ExpertNames) -> list[Weight]:
    """The weights of a layer's experts, from their path here and the name of their block in the checkpoint."""
    assert config.mixture is not None
    table = linear_weights(f"{ours}.router", f"{theirs}.gate")
    for i in range(config.mixture.experts):
        for part in ("gate", "up", "down"):
            name = f"{theirs}.experts.{i}.{getattr(names, part)}.weight"
            table.append(Weight(f"{ours}.{part}", name, "linear", expert=i))
    return table

"""Granite 3 with experts: Granite with a mixture in every layer, whose experts have one tensor per matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import granite, llama
from .config import DecoderConfig
from .mixtral import COMPUTED, expert_counts
from .mixture import Mixture
from .stacked import StackedLinear
from .weights import FusedRows, Weight, linear_weights

ARCHITECTURE = "GraniteMoeForCausalLM"
FIELDS = (*granite.FIELDS, "num_experts_per_tok")
DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2}  # of transformers, for absent fields


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    config = granite.config_from_hf(hf, ARCHITECTURE, computed=COMPUTED)
    experts, per_token = expert_counts(hf, "num_local_experts")
    return replace(config, mixture=Mixture(experts, per_token, config.mlp_size))


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    assert config.mixture is not None
    counts = {"num_local_experts": config.mixture.experts, "num_experts_per_tok": config.mixture.per_token}
    return granite.config_to_hf(config, ARCHITECTURE) | counts


def weights(config: DecoderConfig) -> list[Weight]:
    """The weights of Llama, with gate and up of all experts in one tensor, and down in another."""
    assert config.mixture is not None
    table = [weight for weight in llama.weights(config) if ".mlp." not in weight.path]
    F = config.mixture.size
    gate, up = FusedRows(0, F, 2 * F), FusedRows(F, 2 * F, 2 * F)
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.experts", f"model.layers.{i}.block_sparse_moe"
        table += [
            *linear_weights(f"{ours}.router", f"{theirs}.router.layer"),
            StackedLinear(f"{ours}.gate", f"{theirs}.input_linear.weight", rows=gate),
            StackedLinear(f"{ours}.up", f"{theirs}.input_linear.weight", rows=up),
            StackedLinear(f"{ours}.down", f"{theirs}.output_linear.weight"),
        ]
    return table

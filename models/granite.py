"""Granite 3: Llama with factors of the embeddings, of attention logits, of residual additions and of logits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from . import llama
from .config import DecoderConfig, base_hf_config
from .fields import number
from .llama import weights as weights

ARCHITECTURE = "GraniteForCausalLM"
FIELDS = llama.FIELDS
# The fields of the config, and the facts that they are here. All are 1 by default.
FACTORS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
}


def config_from_hf(
    hf: Mapping[str, Any], architecture: str = ARCHITECTURE, computed: Collection[str] = ()
) -> DecoderConfig:
    """Maps a config. A family that adds to Granite passes what `llama.config_from_hf` takes."""
    factors: dict[str, Any] = {ours: number(hf, theirs, 1.0) for theirs, ours in FACTORS.items()}
    return replace(llama.config_from_hf(hf, architecture, computed={*FACTORS, *computed}), **factors)


def config_to_hf(config: DecoderConfig, architecture: str = ARCHITECTURE) -> dict[str, Any]:
    factors = {theirs: getattr(config, ours) for theirs, ours in FACTORS.items()}
    own = {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    return base_hf_config(config, architecture) | own | factors

"""OLMo 2 (arXiv 2501.00656): Llama with norms after attention and MLP, and on all query and all key heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag
from .llama import no_windows
from .llama import weights as weights
from .rope import Rope

ARCHITECTURE = "Olmo2ForCausalLM"
FIELDS = ("sliding_window", "layer_types")
DEFAULTS = {"rms_norm_eps": 1e-5}  # of transformers, for absent fields


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    return olmo(hf, ARCHITECTURE, no_windows(hf))


def olmo(
    hf: Mapping[str, Any], architecture: str, windows: tuple[int | None, ...], rope: Rope | None = None
) -> DecoderConfig:
    """Reads the fields that OLMo 2 and OLMo 3 share, as `base_config` does."""
    bias = flag(hf, "attention_bias")
    return replace(
        base_config(hf, architecture, windows, rope),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        joint_qk_norm=True,
        pre_norm=False,
        post_norm=True,
    )


def config_to_hf(config: DecoderConfig, architecture: str = ARCHITECTURE) -> dict[str, Any]:
    return base_hf_config(config, architecture) | {"attention_bias": config.qkv_bias}

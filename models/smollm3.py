"""SmolLM3: Llama with some layers that are not rotated, which may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import qwen2
from .config import DecoderConfig, base_config, base_hf_config
from .fields import flag, integer, layer_count, unsupported
from .llama import weights as weights

ARCHITECTURE = "SmolLM3ForCausalLM"
FIELDS = (*qwen2.FIELDS, "no_rope_layer_interval")

# The defaults of transformers for absent fields.
DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
    "sliding_window": None,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    layers, rotated = layer_count(hf), rotated_layers(hf)
    if hf.get("layer_types") is None:
        sliding = flag(hf, "use_sliding_window") and hf["sliding_window"] is not None
        hf["layer_types"] = [qwen2.SLIDING if sliding and not rotated[i] else qwen2.FULL for i in range(layers)]
    bias = flag(hf, "attention_bias")
    return replace(
        base_config(hf, ARCHITECTURE, qwen2.layer_windows(hf), computed=("no_rope_layers", "mlp_bias")),
        unrotated=tuple(i for i in range(layers) if not rotated[i]),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(hf, "mlp_bias"),
    )


def rotated_layers(hf: Mapping[str, Any]) -> list[int]:
    """Reads `no_rope_layers`, which has a 1 for each layer with RoPE. Without it, every fourth layer has none."""
    layers, named = layer_count(hf), hf.get("no_rope_layers")
    if named is None:
        interval = integer(hf, "no_rope_layer_interval", 4)
        return [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(named, list) or len(named) < layers or not all(x in (0, 1) for x in named):
        raise unsupported("no_rope_layers", named, f"{layers} of 0 and 1")
    return named[:layers]


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    rotated = [int(i not in config.unrotated) for i in range(config.num_layers)]
    own = {"no_rope_layers": rotated, "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    return base_hf_config(config, ARCHITECTURE) | qwen2.windows_to_hf(config) | own

"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with q, k and v biases, and a sliding window in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .config import DecoderConfig, base_config, base_hf_config
from .fields import UnsupportedModelError, flag, integer, layer_count, require, unsupported
from .llama import weights as weights

ARCHITECTURE = "Qwen2ForCausalLM"
FIELDS = ("sliding_window", "layer_types", "use_sliding_window", "max_window_layers")
FULL, SLIDING = "full_attention", "sliding_attention"

# The defaults of transformers for absent fields. An explicit null means one kv head per query head, and no window.
DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    require(hf, "attention_bias", None, True)
    return replace(base_config(hf, ARCHITECTURE, layer_windows(hf)), qkv_bias=True)


def layer_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Reads the sliding window of each layer.

    `layer_types` names the layers that have one. Without it, they are the layers from index `max_window_layers` on.
    """
    layers = layer_count(hf)
    sliding = flag(hf, "use_sliding_window") and hf["sliding_window"] is not None
    window = integer(hf, "sliding_window") if sliding else None
    kinds = hf.get("layer_types")
    if kinds is None:
        first = hf["max_window_layers"]
        if type(first) is not int or first < 0:
            raise unsupported("max_window_layers", first, "an integer >= 0")
        return tuple(window if layer >= first else None for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise unsupported("layer_types", kinds, f"{layers} of {FULL!r} and {SLIDING!r}")
    if SLIDING in kinds and window is None:
        raise UnsupportedModelError(
            f"config field layer_types names {SLIDING!r}, which needs use_sliding_window and sliding_window"
        )
    return tuple(window if kind == SLIDING else None for kind in kinds)


def periodic_windows(hf: Mapping[str, Any], period: int) -> tuple[int | None, ...]:
    """Reads the sliding window of each layer of a family whose configs need not say that windows are used.

    Without `layer_types`, every `period`-th layer has full attention.
    """
    kinds = hf.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if (i + 1) % period else FULL for i in range(layer_count(hf))]
    return layer_windows(dict(hf) | {"use_sliding_window": True, "layer_types": kinds})


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return base_hf_config(config, ARCHITECTURE) | windows_to_hf(config)


def windows_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `layer_windows`."""
    sliding = [window is not None for window in config.windows]
    first = sliding.index(True) if any(sliding) else config.num_layers
    return {"use_sliding_window": any(sliding), "max_window_layers": first} | kinds_to_hf(config)


def kinds_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `layer_windows` for families whose configs have no other fields of windows."""
    return {
        "sliding_window": max((window for window in config.windows if window), default=None),
        "layer_types": [FULL if window is None else SLIDING for window in config.windows],
    }

"""Decoders in Flax, and the families of checkpoints they are read from. Import as `kvjax.models`."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from . import internlm2, llama, mistral, phi3, qwen2, qwen3
from .config import DecoderConfig
from .decoder import Attend, AttentionLayer, Decoder
from .fields import UnsupportedModelError
from .rope import Rope, rotate
from .weights import Rows, Weight, by_tensor, hf_shapes

FAMILIES: dict[str, ModuleType] = {
    "internlm2": internlm2,
    "llama": llama,
    "mistral": mistral,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
}


def family(model_type: str) -> ModuleType:
    """The module that maps `model_type`'s config and weight names. Raises UnsupportedModelError for an unknown one."""
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; accepted: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """Maps a Hugging Face `config.json` to a DecoderConfig. Raises UnsupportedModelError, naming the field at fault."""
    return family(str(hf.get("model_type"))).config_from_hf(hf)


__all__ = [
    "FAMILIES",
    "Attend",
    "AttentionLayer",
    "Decoder",
    "DecoderConfig",
    "Rope",
    "Rows",
    "UnsupportedModelError",
    "Weight",
    "by_tensor",
    "config_from_hf",
    "family",
    "hf_shapes",
    "rotate",
]

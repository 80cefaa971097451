"""A family that computes what Llama computes, under a name of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvjax.models import DecoderConfig, llama
from kvjax.models.llama import weights as weights

ARCHITECTURE = "OutsiderForCausalLM"
FIELDS = llama.FIELDS


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    return llama.config_from_hf(hf, ARCHITECTURE)


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return llama.config_to_hf(config) | {"architectures": [ARCHITECTURE]}

"""Decoders in Flax, and the checkpoint families that they are read from. Import as `kvjax.models`.

Axis letters, in every shape of `kvjax.models` and `kvjax.checkpoint`:

    B batch, N tokens, E hidden size, F MLP columns (of an expert), V vocabulary, L layers,
    H kv heads, Hq query heads, G = Hq / H query heads per kv head (the group), D head size,
    C rotated channels of a head (C <= D), X experts, K experts per token,
    R channels of a latent, P channels of a head that RoPE does not rotate
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from .attend import Attend, AttentionLayer, join_sinks
from .card import NONE_SUPPRESSED, Card, Suppressed
from .config import DecoderConfig, KvHeads
from .decoder import Decoder
from .embedding import Embedding, of_layer
from .fields import UnsupportedModelError
from .head import Head
from .latent import Latent
from .mixture import ExpertWeights, Mix, Mixture, densely, gated, routed
from .multimodal import text_config
from .readers import Readers
from .recurrence import Recurrence, RecurrentState
from .registered import Registered
from .rope import Rope, rotate
from .routing import SigmoidRouting
from .stacked import StackedWeight
from .unknown import beyond_llama, check_known
from .weights import FusedRows, Layout, Weight, by_parameter, by_tensor, hf_shapes, read_parameter

FUNCTIONS = ("config_from_hf", "config_to_hf", "weights")  # of the module of a family


def _checked(model_type: str, module: ModuleType) -> dict[str, ModuleType]:
    """The module of a family by name; raises ValueError if it lacks a function."""
    if missing := [name for name in FUNCTIONS if not hasattr(module, name)]:
        raise ValueError(f"{module!r} has no {', '.join(missing)}: expected the module of a family")
    return {model_type: module}


def _own() -> dict[str, ModuleType]:
    """The modules of this package that are families. Each has the name of its `model_type`."""
    modules = {found.name: import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)}
    return {name: module for name, module in modules.items() if all(hasattr(module, each) for each in FUNCTIONS)}


FAMILIES: Mapping[str, ModuleType] = Registered("kvjax.families", _own(), _checked)
"""The module of each family by its `model_type`."""


def family(model_type: str) -> ModuleType:
    """Returns the module that maps the config and the weight names of `model_type`.

    Raises:
        UnsupportedModelError: `model_type` is not a key of FAMILIES.
    """
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported; accepted: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """Maps the content of a Hugging Face `config.json` to a DecoderConfig.

    Of a model that also takes images, that is the text decoder's.

    Raises:
        UnsupportedModelError: the family is not here, and the message lists what its config asks for beyond Llama; or a
            field is unknown, asks for a computation that is not implemented, or has an invalid value. The message names
            the field, its value and what is accepted.
    """
    hf = text_config(hf)
    named = hf.get("model_type")
    try:
        module = family(str(named))
    except UnsupportedModelError as error:
        asked = ", ".join(beyond_llama(hf)) or "nothing"
        raise UnsupportedModelError(f"{error}. Beyond Llama, its config has: {asked}") from None
    config = module.config_from_hf(hf)
    check_known(hf, getattr(module, "FIELDS", ()))
    return config


__all__ = [
    "FAMILIES",
    "NONE_SUPPRESSED",
    "Attend",
    "AttentionLayer",
    "Card",
    "Decoder",
    "DecoderConfig",
    "Embedding",
    "ExpertWeights",
    "FusedRows",
    "Head",
    "KvHeads",
    "Latent",
    "Layout",
    "Mix",
    "Mixture",
    "Readers",
    "Recurrence",
    "RecurrentState",
    "Registered",
    "Rope",
    "SigmoidRouting",
    "StackedWeight",
    "Suppressed",
    "UnsupportedModelError",
    "Weight",
    "by_parameter",
    "by_tensor",
    "config_from_hf",
    "densely",
    "family",
    "gated",
    "hf_shapes",
    "join_sinks",
    "of_layer",
    "read_parameter",
    "rotate",
    "routed",
    "text_config",
]

"""Qwen3-Next: Qwen3.5 with experts, whose recurrent layers have two tensors, ordered by key heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from . import qwen3_5_moe_text, qwen3_5_text
from .config import DecoderConfig
from .hybrid import hybrid_weights
from .qwen3_5_moe_text import COMPUTED, FIELDS, feed_forward, mixture_from_hf, mixture_to_hf
from .qwen3_5_text import text_name
from .qwen3_moe import EXPERTS
from .recurrence import Recurrence
from .weights import FusedRows, Weight

__all__ = ["EXPERTS", "FIELDS", "text_name"]
ARCHITECTURE = "Qwen3NextForCausalLM"
# The defaults of transformers for absent fields.
DEFAULTS = qwen3_5_moe_text.DEFAULTS | {"num_experts": 512, "num_experts_per_tok": 10}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    hf = DEFAULTS | dict(hf)
    return replace(qwen3_5_text.config_from_hf(hf, ARCHITECTURE, COMPUTED), mixture=mixture_from_hf(hf))


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    assert config.mixture is not None
    own = mixture_to_hf(config) | {"norm_topk_prob": config.mixture.normalized}
    return qwen3_5_text.config_to_hf(config, ARCHITECTURE) | own


@dataclass(frozen=True)
class GroupedLinear(Weight):
    """A parameter [in, out] with one part after another, each of all groups, in a tensor of groups of all parts.

    Attributes:
        parts: the outputs of each part in one group.
    """

    parts: tuple[int, ...] = ()

    @property
    def _reorders(self) -> bool:
        return True

    def _ordered(self, x: np.ndarray) -> np.ndarray:
        groups = x.reshape(*x.shape[:-1], -1, sum(self.parts))
        parts = np.split(groups, np.cumsum(self.parts)[:-1], axis=-1)
        return np.concatenate([part.reshape(*x.shape[:-1], -1) for part in parts], axis=-1)


def weights(config: DecoderConfig) -> list[Weight]:
    assert config.recurrence is not None
    return hybrid_weights(config, partial(_projections, config.recurrence), feed_forward(config))


def _projections(recurrence: Recurrence, ours: str, theirs: str) -> list[Weight]:
    """The matrices that a recurrent layer reads hidden states with, by key head: one of each, and its value heads."""
    group, keys = recurrence.value_heads // recurrence.key_heads, recurrence.key_dim
    values = group * recurrence.value_dim
    inputs, all_rows = 2 * keys + values, 2 * keys + 2 * values
    first, second = f"{theirs}.in_proj_qkvz.weight", f"{theirs}.in_proj_ba.weight"
    parts = (keys, keys, values)
    return [
        GroupedLinear(f"{ours}.inputs", first, "linear", FusedRows(0, inputs, all_rows), parts=parts),
        Weight(f"{ours}.gate", first, "linear", FusedRows(inputs, all_rows, all_rows)),
        Weight(f"{ours}.rate", second, "linear", FusedRows(0, group, 2 * group)),
        Weight(f"{ours}.decay", second, "linear", FusedRows(group, 2 * group, 2 * group)),
    ]

"""The tensors of hybrid models, whose layers are numbered in one order: those with attention and recurrent ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from jax.typing import DTypeLike

from . import llama
from .config import DecoderConfig
from .weights import FusedRows, Layout, Shape, Sliceable, Weight, mlp_weights

Named = Callable[[str, str], list[Weight]]
"""Returns the weights of a part of a layer, from its path here and its name in the checkpoint."""


@dataclass(frozen=True)
class ConvolutionWeight(Weight):
    """The kernel [channels, taps] of a convolution over each channel by itself, in a tensor [channels, 1, taps]."""

    layout: Layout = "embedding"

    def hf_shape(self, shape: Shape) -> Shape:
        channels, taps = shape
        return (channels, 1, taps)

    def read(self, tensor: Sliceable, shape: Shape, index: tuple[slice, ...], dtype: DTypeLike) -> np.ndarray:
        """Reads slice `index`, as `Weight.read` does."""
        channels, taps = index
        return np.ascontiguousarray(tensor[channels, 0:1, taps][:, 0], dtype)

    def write(self, parameter: np.ndarray, tensor: np.ndarray) -> None:
        tensor[:, 0] = parameter


def hybrid_weights(config: DecoderConfig, projections: Named, feed_forward: Named) -> list[Weight]:
    """The weights of all layers. All vectors are wide: 1 + scale of norms, and what decays the memory.

    Args:
        config: a decoder with `recurrence` and `output_gate`.
        projections: the matrices that a recurrent layer reads hidden states with.
        feed_forward: the MLP or the experts of a layer.
    """
    recurrence, D = config.recurrence, config.head_dim
    assert recurrence is not None
    places = [sum(recurrence.before[: i + 1]) + i for i in range(config.num_layers)]  # of attention layers, in all
    table = []
    for weight in llama.weights(config):
        if ".mlp." in weight.path:
            continue
        if weight.path.startswith("layers."):
            _, layer, _ = weight.path.split(".", 2)
            weight = replace(weight, name=weight.name.replace(f".{layer}.", f".{places[int(layer)]}.", 1))
        if weight.path.endswith("attention.query"):  # a head's queries and its gate share a tensor
            gate = weight.path.replace("query", "output_gate")
            table.append(replace(weight, path=gate, rows=FusedRows(D, 2 * D, 2 * D)))
            weight = replace(weight, rows=FusedRows(0, D, 2 * D))
        table.append(weight)
    for i, count in enumerate(recurrence.before):
        table += feed_forward(f"layers.{i}", f"model.layers.{places[i]}")
        for j in range(count):
            ours, theirs = f"layers.{i}.before.{j}", f"model.layers.{places[i] - count + j}"
            table += projections(f"{ours}.net", f"{theirs}.linear_attn")
            table += _recurrent(ours, theirs) + feed_forward(ours, theirs)
    return [replace(weight, wide=weight.layout == "vector") for weight in table]


def mlp(ours: str, theirs: str) -> list[Weight]:
    """The weights of a layer's MLP."""
    return mlp_weights(f"{ours}.mlp", f"{theirs}.mlp")


def _recurrent(ours: str, theirs: str) -> list[Weight]:
    """The weights of a recurrent layer that all families name alike."""
    net = f"{theirs}.linear_attn"
    return [
        Weight(f"{ours}.net.output", f"{net}.out_proj.weight", "linear"),
        ConvolutionWeight(f"{ours}.net.convolution", f"{net}.conv1d.weight"),
        Weight(f"{ours}.net.decay_bias", f"{net}.dt_bias", "vector"),
        Weight(f"{ours}.net.log_decay", f"{net}.A_log", "vector"),
        Weight(f"{ours}.net.scale", f"{net}.norm.weight", "vector"),
        Weight(f"{ours}.norm.scale", f"{theirs}.input_layernorm.weight", "vector"),
        Weight(f"{ours}.mlp_norm.scale", f"{theirs}.post_attention_layernorm.weight", "vector"),
    ]

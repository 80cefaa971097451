"""A model without its last layers, which is what its first layers compute, at a part of the cost."""

from __future__ import annotations

from dataclasses import replace

from flax import nnx

from kvjax.models import Decoder


def first_layers(params: Decoder, count: int) -> Decoder:
    """The model with its first `count` layers. It shares their arrays."""
    graph, state = nnx.split(params)
    cut: Decoder = nnx.merge(graph, state)
    cut.layers = nnx.List(params.layers[:count])
    cut.config = replace(params.config, windows=params.config.windows[:count])
    return cut

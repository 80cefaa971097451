"""Low-rank adapters of a layer's linear maps (LoRA, arXiv 2106.09685), with which the layer runs learned tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from kvjax.models import DecoderConfig


class Map(NamedTuple):
    """A linear map that has adapters: its place in a layer, and the names of the sizes of its input and output."""

    part: str
    matrix: str
    source: str
    target: str


MAPS = {
    "self_attn.q_proj": Map("attention", "query", "input_dim", "query_dim"),
    "self_attn.k_proj": Map("attention", "key", "input_dim", "kv_dim"),
    "self_attn.v_proj": Map("attention", "value", "input_dim", "kv_dim"),
    "self_attn.o_proj": Map("attention", "output", "query_dim", "input_dim"),
    "mlp.gate_proj": Map("mlp", "gate", "input_dim", "mlp_dim"),
    "mlp.up_proj": Map("mlp", "up", "input_dim", "mlp_dim"),
    "mlp.down_proj": Map("mlp", "down", "mlp_dim", "input_dim"),
}


def adapter_shapes(sizes: Mapping[str, int | None]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's adapters, named as PEFT names them: A [rank, in] and B [out, rank] of each map.

    If `mlp_dim` is None, the maps of the MLP have none.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, own in MAPS.items():
        source, target, rank = sizes[own.source], sizes[own.target], sizes["rank"]
        if source is not None and target is not None and rank is not None:
            shapes |= {f"{name}.lora_A.weight": (rank, source), f"{name}.lora_B.weight": (target, rank)}
    return shapes


def adapter_sizes(config: DecoderConfig) -> dict[str, int | None]:
    """Returns the sizes of adapters that a model fixes. Experts have no adapters.

    Raises:
        ValueError: the model has latent attention, or layers that take values from keys; their maps have no adapters.
            Or its layers have inputs, which learned tokens have not.
    """
    if config.latent is not None:
        raise ValueError(f"{config.family} has latent attention: expected a model with keys and values of each head")
    if not all(map(config.has_values, range(config.num_layers))):
        raise ValueError(f"{config.family} takes values from keys: expected a projection to values in each layer")
    if config.layer_input_size:
        raise ValueError(f"{config.family} has inputs of each layer: expected layers that take hidden states alone")
    return {
        "input_dim": config.hidden_size,
        "query_dim": config.num_heads * config.head_dim,
        "kv_dim": config.num_kv_heads * config.head_dim,
        "mlp_dim": config.mlp_size if config.mixture is None else None,
    }


def adapted(layer: Any, tensors: Mapping[str, Array]) -> Any:
    """Returns a layer with W + (B A)^T for the matrix W [in, out] of each adapted map, added up in float32.

    The dtype of W stays. Maps without adapters stay as they are.
    """
    made = nnx.merge(*nnx.split(layer))
    for name, own in MAPS.items():
        if f"{name}.lora_A.weight" not in tensors:
            continue
        first, second = (tensors[f"{name}.lora_{matrix}.weight"].astype(jnp.float32) for matrix in "AB")
        owner = getattr(made, own.part)
        old = getattr(owner, own.matrix)
        change = jnp.einsum("RI,OR->IO", first, second, precision="highest").reshape(old.shape)
        setattr(owner, own.matrix, old.replace((old[...].astype(jnp.float32) + change).astype(old.dtype)))
    return made

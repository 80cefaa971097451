"""Gates beside the parameters of a model, where scores find them."""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvjax.checks import check_one_kind, check_params
from kvjax.mesh.sharding import mesh_of, parameter_sharding, place
from kvjax.models import Decoder

from .files import Gates, read_gates
from .forms import FORMS


class Network(nnx.Module):
    """The gates of one layer: a network from hidden states to a score per kv head.

    Args:
        method: a key of `FORMS`.
        tensors: those of the layer, by name.
    """

    def __init__(self, method: str, tensors: Mapping[str, Array]):
        self.method = method
        self.tensors = nnx.Dict({name: _parameter(tensor) for name, tensor in tensors.items()})

    def __call__(self, hidden: Float[Array, "B N E"]) -> Float[Array, "B H N"]:
        score = FORMS[self.method].score
        assert score is not None
        return score({name: parameter[...] for name, parameter in self.tensors.items()}, hidden)


def _parameter(tensor: Array | np.ndarray) -> nnx.Param:
    """A parameter that is replicated on a mesh."""
    return nnx.Param(tensor, out_sharding=("gate",) * tensor.ndim, eager_sharding=False)


def with_gates(params: Decoder, gates: Gates | str | os.PathLike[str]) -> Decoder:
    """The same parameters with gates beside them, which policies such as `kvzap` read.

    Gates of several methods may be attached, one set of each. They take the dtype of the model's weights, and each
    device of a mesh has all of them. `kvjax.save` and `kvjax.save_hf` do not write them.

    Args:
        params: the decoder.
        gates: a folder of gates, a repository on the hub, a file of Fast KVzip's authors (`read_gates`), or `Gates`.

    Raises:
        CheckpointError: the gates cannot be read.
        ValueError: the gates are of another model: of other numbers of layers or kv heads, or another hidden size; the
            method's gates belong to its policy; or the model's layers have kv heads of several kinds.
    """
    check_params(params)
    check_one_kind("gates", params)
    given = gates if isinstance(gates, Gates) else read_gates(gates)
    if given.form.score is None:
        raise ValueError(
            f"gates of {given.method} read no hidden states: expected them as the option gates= of the policy"
        )
    config = params.config
    ours = {"layers": config.num_layers, "kv heads": config.num_kv_heads, "hidden size": config.hidden_size}
    shapes = jax.eval_shape(
        given.form.score,
        dict(given.layers[0]),
        jax.ShapeDtypeStruct((1, 1, given.sizes["input_dim"] or 0), jnp.float32),
    )
    theirs = {"layers": len(given.layers), "kv heads": shapes.shape[1], "hidden size": given.sizes["input_dim"]}
    if ours != theirs:
        raise ValueError(f"gates for {_listed(theirs)}: expected gates for {_listed(ours)}, as the model has")
    graph, state = nnx.split(params)
    made = nnx.merge(graph, state)
    dtype, mesh = params.embed.dtype, mesh_of(params)

    def parameter(tensor: np.ndarray) -> Array:
        cast = np.asarray(tensor).astype(dtype)
        return jnp.asarray(cast) if mesh is None else place(cast, parameter_sharding(mesh, _parameter(cast)))

    for layer, tensors in zip(made.layers, given.layers, strict=True):
        network = Network(given.method, {name: parameter(tensor) for name, tensor in tensors.items()})
        layer.attention.gates = nnx.Dict({**dict(layer.attention.gates), given.method: network})
    return made


def _listed(sizes: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())

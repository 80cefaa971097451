"""Gates beside the parameters of a model, where scores find them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from kvjax.checks import check_one_kind, check_params, cut
from kvjax.mesh.sharding import mesh_of, parameter_sharding, place
from kvjax.models import Decoder, DecoderConfig
from kvjax.runtime.modes import own_modes

from .adapters import adapted, adapter_sizes
from .files import Gates, read_gates
from .forms import FORMS, Tensors


class Network(nnx.Module):
    """The gates of one layer: a network from hidden states to a score per kv head, or adapters of the layer.

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
        return score(self._arrays(), hidden)

    def adapt(self, layer: Any) -> Any:
        """Returns the layer with these adapters, with which it runs learned tokens."""
        return adapted(layer, self._arrays())

    def _arrays(self) -> Tensors:
        return {name: parameter[...] for name, parameter in self.tensors.items()}


def _parameter(tensor: Array | np.ndarray) -> nnx.Param:
    """A parameter that is replicated on a mesh."""
    return nnx.Param(tensor, out_sharding=("gate",) * tensor.ndim, eager_sharding=False)


@own_modes()
def with_gates(params: Decoder, gates: Gates | str | os.PathLike[str]) -> Decoder:
    """The same parameters with gates beside them, which policies such as `kvzap` and `lookaheadkv` read.

    Gates of several methods may be attached, one set of each. They take the dtype of the model's weights, and each
    device of a mesh has all of them. `kvjax.save` and `kvjax.save_hf` do not write them.

    Args:
        params: the decoder.
        gates: a folder of gates, a repository on the hub, a file of Fast KVzip's authors (`read_gates`), or `Gates`.

    Raises:
        CheckpointError: the gates cannot be read.
        ValueError: the gates are of another model: of other numbers of layers or kv heads, or other widths; the
            method's gates belong to its policy; they adapt layers, and the model has latent attention; the model's
            layers have kv heads of several kinds; or a number is NaN or infinite in the dtype of the model.
    """
    check_params(params)
    check_one_kind("gates", params.config)
    given = gates if isinstance(gates, Gates) else read_gates(gates)
    if not given.form.attached:
        raise ValueError(
            f"gates of {given.method} read no hidden states: expected them as the option gates= of the policy"
        )
    theirs, ours = _facts(given, params.config)
    if ours != theirs:
        raise ValueError(f"gates for {_listed(theirs)}: expected gates for {_listed(ours)}, as the model has")
    graph, state = nnx.split(params)
    made = nnx.merge(graph, state)
    mesh = mesh_of(params)

    def parameter(tensor: np.ndarray) -> Array:
        return jnp.asarray(tensor) if mesh is None else place(tensor, parameter_sharding(mesh, _parameter(tensor)))

    for layer, tensors in zip(made.layers, _cast(given, params.embed.dtype), strict=True):
        arrays = {name: parameter(tensor) for name, tensor in tensors.items()}
        if given.form.learned is not None and "tokens" in arrays:  # layers keep one structure, and so share programs
            made.gates = nnx.Dict({**dict(made.gates), given.method: _parameter(arrays.pop("tokens"))})
        network = Network(given.method, arrays)
        layer.attention.gates = nnx.Dict({**dict(layer.attention.gates), given.method: network})
    return made


def _cast(given: Gates, dtype: Any) -> list[dict[str, np.ndarray]]:
    """The tensors of each layer in a dtype. Raises ValueError for numbers that are not finite there."""
    with np.errstate(over="ignore"):
        layers = [{name: np.asarray(tensor).astype(dtype) for name, tensor in own.items()} for own in given.layers]
    named = {f"layers.{i}.{name}": tensor for i, own in enumerate(layers) for name, tensor in own.items()}
    if broken := [name for name, tensor in named.items() if not np.isfinite(tensor).all()]:
        raise ValueError(
            f"gates of {given.method} with NaN or infinity as {jnp.dtype(dtype).name} in tensor(s) "
            f"{cut(', '.join(broken))}: expected finite numbers"
        )
    return layers


def _facts(given: Gates, config: DecoderConfig) -> tuple[dict[str, int | None], dict[str, int | None]]:
    """The sizes of the model that gates are for, and of this one."""
    theirs: dict[str, int | None] = {"layers": len(given.layers)}
    ours: dict[str, int | None] = {"layers": config.num_layers}
    if given.form.score is None:
        fixed = adapter_sizes(config)
        return theirs | {name: given.sizes[name] for name in fixed}, ours | fixed
    width = given.sizes["input_dim"]
    hidden = jax.ShapeDtypeStruct((1, 1, width or 0), jnp.float32)
    kv_heads = jax.eval_shape(given.form.score, dict(given.layers[0]), hidden).shape[1]
    theirs |= {"kv heads": kv_heads, "hidden size": width}
    return theirs, ours | {"kv heads": config.num_kv_heads, "hidden size": config.hidden_size}


def _listed(sizes: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())

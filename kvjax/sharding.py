"""Many devices: meshes, and where parameters lie on them. Batch over `data`; heads and MLP columns over `model`.

Where `model` exceeds the kv heads, the devices that share one of them become an axis of their own, `replica`: keys and
values are then sharded over `model` and replicated over `replica`, query heads and MLP columns sharded over both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array

from kvjax.models import Decoder, DecoderConfig

DATA, MODEL, REPLICA = "data", "model", "replica"


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of data x model devices: batches are spread over `data`, heads and MLP columns over `model`.

    Args:
        devices: as many as it takes; by default the first ones that there are, in an order that suits their wiring.

    Raises:
        ValueError: for sizes below 1, or another number of devices than that.
    """
    for name, size in ((DATA, data), (MODEL, model)):
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name}={size!r}; accepted is an integer >= 1")
    there = jax.device_count() if devices is None else len(devices)
    if there < data * model or (devices is not None and there > data * model):
        known = f"there are {there} ({jax.default_backend()})" if devices is None else f"{there} were given"
        raise ValueError(f"a mesh of data={data} x model={model} takes {data * model} devices; {known}")
    return jax.make_mesh((data, model), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices)


def fit_mesh(mesh: Mesh, config: DecoderConfig) -> Mesh:
    """The mesh as a model's arrays use it: with an axis `replica` where `model` exceeds the kv heads.

    Raises:
        ValueError: if the mesh is not of the kind that `make_mesh` makes, or its `model` does not fit the model; it
            names the sizes that do.
    """
    if mesh.axis_names not in ((DATA, MODEL), (DATA, MODEL, REPLICA)) or set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(f"{mesh}; accepted is a mesh of kvjax.make_mesh, with Auto axes 'data' and 'model'")
    data, model = mesh.shape[DATA], mesh.size // mesh.shape[DATA]
    replicas = kv_replicas(model, config)
    axes = {DATA: data, MODEL: model // replicas} | ({REPLICA: replicas} if replicas > 1 else {})
    return Mesh(mesh.devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def kv_replicas(model: int, config: DecoderConfig) -> int:
    """Devices that share a kv head on a mesh of so many over `model`; ValueError if that does not fit the model."""
    legal = [size for size in range(1, config.num_heads + 1) if _divides(size, config)]
    if model not in legal:
        raise ValueError(
            f"model={model} does not fit {config.num_heads} query heads, {config.num_kv_heads} kv heads and "
            f"{config.mlp_size} MLP columns; accepted for this model are {', '.join(map(str, legal))}"
        )
    return max(1, model // config.num_kv_heads)


def _divides(model: int, config: DecoderConfig) -> bool:
    """Whether devices get equal shares: of the kv heads, or of one kv head's query heads, and of the MLP's columns."""
    whole = config.num_kv_heads % model == 0
    shared = model % config.num_kv_heads == 0 and config.num_heads % model == 0
    return (whole or shared) and config.mlp_size % model == 0


def heads_axes(mesh: Mesh) -> str | tuple[str, ...]:
    """The mesh axes over which query heads are spread; kv heads are over `model` alone."""
    return (MODEL, REPLICA) if REPLICA in mesh.axis_names else MODEL


def logical_sharding(mesh: Mesh, axes: Sequence[str], shape: Sequence[int]) -> NamedSharding:
    """Where an array lies by what its axes are. A vocabulary that does not divide is replicated.

    Args:
        mesh: as `fit_mesh` gives it for the model.
        axes: "batch", "vocab", "heads", "kv_heads", "mlp", or names of axes that are never cut.
    """
    everywhere = heads_axes(mesh)
    rules = {"batch": DATA, "vocab": everywhere, "heads": everywhere, "kv_heads": MODEL, "mlp": everywhere}
    devices = mesh.size // mesh.shape[DATA]
    cut = [
        None if name == "vocab" and size % devices else rules.get(name) for name, size in zip(axes, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*cut))


def parameter_sharding(mesh: Mesh, parameter: nnx.Variable[Any]) -> NamedSharding:
    """Where a parameter lies. It may hold an array or a `jax.ShapeDtypeStruct`; for the mesh see `logical_sharding`."""
    return logical_sharding(mesh, parameter.get_metadata()["out_sharding"], parameter.shape)


def shard(params: Decoder, mesh: Mesh) -> Decoder:
    """The same parameters spread over a mesh of `make_mesh`. Raises ValueError if it does not fit the model."""
    mesh = fit_mesh(mesh, params.config)
    graph, state = nnx.split(params)
    spread = {
        path: parameter.replace(place(parameter[...], parameter_sharding(mesh, parameter)))
        for path, parameter in nnx.to_flat_state(state)
    }
    return nnx.merge(graph, nnx.from_flat_state(spread))


def mesh_of(params: Decoder) -> Mesh | None:
    """The mesh that parameters are spread over, as `fit_mesh` gives it; None if they lie on one device."""
    mesh = getattr(getattr(jax.tree.leaves(params)[0], "sharding", None), "mesh", None)
    return fit_mesh(mesh, params.config) if isinstance(mesh, Mesh) and mesh.size > 1 else None


def place(x: ArrayLike, sharding: NamedSharding) -> Array:
    """The array on its devices. With several processes each gives the same `x` and keeps its own slices of it."""
    if jax.process_count() == 1 or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays with axes [B, ...]."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def heads_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays with axes [B, H, ...], H being kv heads or, in whole groups, query heads."""
    return NamedSharding(mesh, PartitionSpec(DATA, MODEL))


def check_batch(rows: int, mesh: Mesh | None) -> None:
    """Raises ValueError if a batch does not divide over the mesh's devices."""
    if mesh is not None and rows % mesh.shape[DATA]:
        raise ValueError(
            f"a batch of {rows} rows on a mesh of data={mesh.shape[DATA]}; accepted are multiples of "
            f"{mesh.shape[DATA]} rows"
        )


def fetch(x: Array) -> np.ndarray:
    """The whole array on the host, on every host of several."""
    if not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    if len(x.sharding.device_set) > 1:  # of another array of the same shards, or `x` would keep what is gathered
        x = jax.make_array_from_single_device_arrays(
            x.shape, x.sharding, [shard.data for shard in x.addressable_shards]
        )
    return np.asarray(x)

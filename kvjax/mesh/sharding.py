"""Meshes of several devices, and the shardings of parameters and batches on them.

The batch is sharded over the mesh axis `data`, and heads, experts and MLP columns over `model`. If `model` exceeds the
number of kv heads, the devices that hold the same kv head form a third axis, `replica`. Keys and values are then
sharded over `model` and replicated over `replica`, and query heads, experts and MLP columns are sharded over both.
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

from kvjax.checks import check_params, checked_size, counted, shown
from kvjax.models import Decoder, DecoderConfig
from kvjax.runtime.modes import own_modes

DATA, MODEL, REPLICA = "data", "model", "replica"


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a mesh of data x model devices, with Auto axes `data` and `model`.

    Args:
        data: the number of devices that batches are sharded over.
        model: the number of devices that heads, experts and MLP columns are sharded over.
        devices: exactly data * model devices, each once. By default the first available ones, in an order that suits
            their interconnect.

    Raises:
        ValueError: a size is not an integer in 1 .. 2**31 - 1, the number of devices does not match, or one is there
            twice.
    """
    data, model = checked_size(DATA, data), checked_size(MODEL, model)
    given = devices if isinstance(devices, list | tuple | np.ndarray) else ()
    if devices is not None and not (len(given) and all(isinstance(device, jax.Device) for device in given)):
        raise ValueError(f"devices is of type {type(devices).__name__}: expected a list of JAX devices")
    if len(set(given)) < len(given):
        raise ValueError(f"devices={shown(given)} has a device twice: expected each once")
    available = jax.device_count() if devices is None else len(devices)
    if available < data * model or (devices is not None and available > data * model):
        known = f"there are {available} ({jax.default_backend()})" if devices is None else f"{available} were given"
        raise ValueError(f"a mesh of data={data} x model={model} takes {data * model} devices; {known}")
    return jax.make_mesh((data, model), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices)


def fit_mesh(mesh: Mesh, config: DecoderConfig) -> Mesh:
    """Returns the mesh that a model's arrays use. It has an axis `replica` if `model` exceeds the number of kv heads.

    Args:
        mesh: a mesh of `make_mesh`, or one that this function returned for the same model.
        config: the model.

    Raises:
        ValueError: the mesh has other axes than those of `make_mesh`, or its `model` does not fit the model. The
            message lists the sizes that fit.
    """
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is of type {type(mesh).__name__}: expected a mesh of kvjax.make_mesh")
    if mesh.axis_names not in ((DATA, MODEL), (DATA, MODEL, REPLICA)) or set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(f"{mesh}: expected a mesh of kvjax.make_mesh, with Auto axes 'data' and 'model'")
    data, model = mesh.shape[DATA], mesh.size // mesh.shape[DATA]
    replicas = kv_replicas(model, config)
    axes = {DATA: data, MODEL: model // replicas} | ({REPLICA: replicas} if replicas > 1 else {})
    return Mesh(mesh.devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def kv_replicas(model: int, config: DecoderConfig) -> int:
    """Returns the number of devices that hold each kv head, if heads are sharded over `model` devices.

    Raises:
        ValueError: `model` does not fit the model. The message lists the sizes that fit.
    """
    accepted = [size for size in range(1, config.num_heads + 1) if _divides(size, config)]
    if model not in accepted:
        fed = " and ".join(f"{size} {what}" for what, size in _feed_forward(config).items())
        kinds = " or ".join(str(heads.number) for heads in config.kinds_of_heads)
        raise ValueError(
            f"model={model} does not fit {config.num_heads} query heads, {kinds} kv heads and {fed}; "
            f"accepted for this model are {', '.join(map(str, accepted))}"
        )
    return max(1, model // config.num_kv_heads)


def _divides(model: int, config: DecoderConfig) -> bool:
    """Returns whether `model` devices get equal numbers of heads, experts and MLP columns.

    Each device gets complete kv heads, or an equal part of the query heads of one kv head, of which as many devices
    have a copy in all layers.
    """
    counts = [heads.number for heads in config.kinds_of_heads]
    alike = len({max(1, model // count) for count in counts}) == 1
    complete = all(count % model == 0 for count in counts)
    replicated = all(model % count == 0 for count in counts) and config.num_heads % model == 0
    return alike and (complete or replicated) and all(size % model == 0 for size in _feed_forward(config).values())


def _feed_forward(config: DecoderConfig) -> dict[str, int]:
    """Lists what is sharded of MLPs and of experts, if there are layers with them."""
    kinds = {config.has_experts(layer) for layer in range(config.num_layers)}
    experts = {} if config.mixture is None else {"experts": config.mixture.experts}
    if config.mixture is not None and config.mixture.shared is not None:
        experts |= {"shared MLP columns": config.mixture.shared}
    dense = False in kinds or (config.mixture is not None and config.mixture.beside_mlp)
    return (experts if True in kinds else {}) | ({"MLP columns": config.mlp_size} if dense else {})


def heads_axes(mesh: Mesh) -> str | tuple[str, ...]:
    """Returns the mesh axes that query heads are sharded over. Kv heads are sharded over `model` alone."""
    return (MODEL, REPLICA) if REPLICA in mesh.axis_names else MODEL


def logical_sharding(mesh: Mesh, axes: Sequence[str], shape: Sequence[int]) -> NamedSharding:
    """Returns the sharding of an array from the logical names of its axes.

    A vocabulary axis whose size is not a multiple of the number of devices is replicated.

    Args:
        mesh: the mesh from `fit_mesh`.
        axes: the logical name of each axis: "batch", "vocab", "heads", "kv_heads", "mlp", "experts", or any other name
            for an axis that is never sharded.
        shape: the size of each axis.
    """
    cut_alike = dict.fromkeys(("vocab", "heads", "mlp", "experts"), heads_axes(mesh))
    rules = {"batch": DATA, "kv_heads": MODEL, **cut_alike}
    devices = mesh.size // mesh.shape[DATA]
    spec = [
        None if name == "vocab" and size % devices else rules.get(name) for name, size in zip(axes, shape, strict=True)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))


def parameter_sharding(mesh: Mesh, parameter: nnx.Variable[Any]) -> NamedSharding:
    """Returns the sharding of a parameter from its logical axes.

    Args:
        mesh: the mesh from `fit_mesh`.
        parameter: a parameter that holds an array or a `jax.ShapeDtypeStruct`.
    """
    return logical_sharding(mesh, parameter.get_metadata()["out_sharding"], parameter.shape)


@own_modes()
def shard(params: Decoder, mesh: Mesh) -> Decoder:
    """Returns the same parameters, sharded over a mesh.

    Args:
        params: the decoder.
        mesh: a mesh of `make_mesh`.

    Raises:
        ValueError: the mesh was not made by `make_mesh`, or does not fit the model.
    """
    check_params(params)
    mesh = fit_mesh(mesh, params.config)
    graph, state = nnx.split(params)
    sharded = {
        path: parameter.replace(place(parameter[...], parameter_sharding(mesh, parameter)))
        for path, parameter in nnx.to_flat_state(state)
    }
    return nnx.merge(graph, nnx.from_flat_state(sharded))


def mesh_of(params: Decoder) -> Mesh | None:
    """Returns the mesh that parameters are sharded over, in the form of `fit_mesh`; None if they are on one device."""
    mesh = getattr(getattr(params.embed[...], "sharding", None), "mesh", None)  # all leaves take long to list
    return fit_mesh(mesh, params.config) if isinstance(mesh, Mesh) and mesh.size > 1 else None


def platform_of(params: Decoder) -> str:
    """The platform of the devices that hold parameters: "cpu", "gpu" or "tpu"."""
    device: Any = next(iter(params.embed[...].sharding.device_set))
    return device.platform


def place(x: ArrayLike, sharding: NamedSharding) -> Array:
    """Places an array on the devices of a sharding.

    With several processes, each passes the same `x` and keeps the slices of its own devices.
    """
    if jax.process_count() == 1 or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays with axes [B, ...]."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def heads_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays with axes [B, H, ...], for kv heads, or query heads in complete groups."""
    return NamedSharding(mesh, PartitionSpec(DATA, MODEL))


def check_batch(rows: int, mesh: Mesh | None) -> None:
    """Raises ValueError if the number of rows is not a multiple of the size of the mesh axis `data`."""
    if mesh is not None and rows % mesh.shape[DATA]:
        raise ValueError(
            f"a batch of {counted(rows, 'row')} on a mesh of data={mesh.shape[DATA]}: expected multiples of "
            f"{mesh.shape[DATA]} rows"
        )


def check_allocated(x: Array | np.ndarray | jax.ShapeDtypeStruct) -> None:
    """Raises ValueError for an array of a planned cache."""
    if isinstance(x, jax.ShapeDtypeStruct):
        raise ValueError("a planned cache has shapes and no values: expected a cache that has been allocated")


def fetch(x: Array | np.ndarray) -> np.ndarray:
    """Returns the complete array on the host, where it may be already.

    With several processes, all must call it, and each gets the array.

    Raises ValueError for an array of a planned cache, or of a program that is being traced.
    """
    check_allocated(x)
    if isinstance(x, jax.core.Tracer):
        raise ValueError(
            "this call reads values of arrays, which have none under jax.jit and other transformations: expected a "
            "call outside of them, where kvjax.extend alone works"
        )
    if isinstance(x, np.ndarray):
        return x
    if not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    if len(x.sharding.device_set) > 1:  # gather through a second array, because an array caches its host copy
        x = jax.make_array_from_single_device_arrays(
            x.shape, x.sharding, [shard.data for shard in x.addressable_shards]
        )
    return np.asarray(x)

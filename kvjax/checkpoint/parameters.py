"""A decoder's parameters before and while they are loaded: shapes, shardings, and arrays that are read by slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from kvjax.mesh.sharding import fit_mesh, parameter_sharding
from kvjax.models import Card, Decoder, DecoderConfig

# A callback that receives, after each tensor, the number of bytes done and the total number of bytes.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Blank:
    """A decoder without values: the shape of each parameter, and where the parameter will be placed.

    Attributes:
        graph: the structure of the decoder.
        variables: the abstract parameters by path, such as `layers.0.attention.query`.
        mesh: the mesh that the parameters are sharded over, from `fit_mesh`; None for the default device.
    """

    graph: nnx.GraphDef[Decoder]
    variables: Mapping[str, nnx.Variable[Any]]
    mesh: Mesh | None

    @classmethod
    def of(cls, config: DecoderConfig, mesh: Mesh | None = None) -> Blank:
        """Builds the blank decoder of a config. Raises ValueError if the mesh does not fit the model."""
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
        variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
        return cls(graph, variables, None if mesh is None else fit_mesh(mesh, config))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by path."""
        return {path: variable.shape for path, variable in self.variables.items()}

    def sharding(self, path: str) -> NamedSharding | None:
        """Returns the sharding of a parameter, or None for the default device."""
        return None if self.mesh is None else parameter_sharding(self.mesh, self.variables[path])

    def filled(self, arrays: Mapping[str, Array | jax.ShapeDtypeStruct], card: Card | None = None) -> Decoder:
        """Returns the decoder with these arrays, or abstract arrays, as parameters.

        Args:
            arrays: the value of every parameter by path.
            card: what the checkpoint says; None for nothing.
        """
        flat: Any = {
            tuple(int(part) if part.isdigit() else part for part in path.split(".")): variable.replace(arrays[path])
            for path, variable in self.variables.items()
        }
        decoder = nnx.merge(self.graph, nnx.from_flat_state(flat))
        decoder.card = card or decoder.card
        return decoder


def by_path(params: Decoder) -> dict[str, Array]:
    """Returns the array of each parameter of a checkpoint by path. Gates and statistics have folders of their own."""
    flat = nnx.to_flat_state(nnx.state(params))
    beside = {"gates", "statistics"}
    return {".".join(map(str, path)): parameter[...] for path, parameter in flat if beside.isdisjoint(path)}


@jax.jit
def all_finite(array: Array) -> Array:
    """Returns whether an array has neither NaN nor infinity. The device that holds it looks, while others are read."""
    return jnp.all(jnp.isfinite(array))


def from_slices(
    shape: tuple[int, ...], sharding: NamedSharding | None, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> Array:
    """Builds an array from the slices that the devices of this process hold.

    It reads a slice once even if several devices hold it, and drops it before it reads the next one.
    `jax.make_array_from_callback` would read one slice per device and keep all of them on the host.

    Args:
        shape: the shape of the whole array.
        sharding: the placement of the array; None for the default device.
        read: returns the slice at an index.
    """
    if sharding is None:
        return jax.device_put(read(tuple(slice(0, size) for size in shape))).block_until_ready()
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(
            (part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True)
        )
        holders.setdefault(bounds, []).append(device)
    shards: list[Array] = []
    for bounds, devices in holders.items():
        part = read(tuple(slice(*bound) for bound in bounds))
        shards += jax.block_until_ready([jax.device_put(part, device) for device in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)

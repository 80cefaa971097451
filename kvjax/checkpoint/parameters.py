"""A decoder's parameters one at a time: what they will be, arrays from slices of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from kvjax.models import Decoder, DecoderConfig
from kvjax.sharding import fit_mesh, parameter_sharding

# Called with the bytes that are done and those that there are in all, after each tensor.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Blank:
    """A decoder to be: the shape of each parameter, by its path, and where it will lie (None: the default device)."""

    graph: nnx.GraphDef[Decoder]
    variables: Mapping[str, nnx.Variable[Any]]
    mesh: Mesh | None

    @classmethod
    def of(cls, config: DecoderConfig, mesh: Mesh | None = None) -> Blank:
        """Raises ValueError if the mesh does not fit the model."""
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
        variables = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
        return cls(graph, variables, None if mesh is None else fit_mesh(mesh, config))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {path: variable.shape for path, variable in self.variables.items()}

    def sharding(self, path: str) -> NamedSharding | None:
        return None if self.mesh is None else parameter_sharding(self.mesh, self.variables[path])

    def filled(self, arrays: Mapping[str, Array | jax.ShapeDtypeStruct]) -> Decoder:
        """The decoder with these arrays, or shapes of arrays, as parameters."""
        flat: Any = {
            tuple(int(part) if part.isdigit() else part for part in path.split(".")): variable.replace(arrays[path])
            for path, variable in self.variables.items()
        }
        return nnx.merge(self.graph, nnx.from_flat_state(flat))


def by_path(params: Decoder) -> dict[str, Array]:
    """The parameters' arrays."""
    return {".".join(map(str, path)): parameter[...] for path, parameter in nnx.to_flat_state(nnx.state(params))}


def from_slices(
    shape: tuple[int, ...], sharding: NamedSharding | None, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> Array:
    """An array of which this process reads the slices that its devices hold, on the default device without a sharding.

    A slice that several devices hold is read once, and dropped before the next one is read:
    `jax.make_array_from_callback` reads one for each device and holds them all.
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

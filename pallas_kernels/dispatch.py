"""Chooses an implementation: the platform's own kernel where one exists and serves the shapes, else the reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

_announced: set[tuple[str, str]] = set()


def platform() -> str:
    """What is compiled for: the devices of the mesh whose `jax.shard_map` this is called in, else the default ones."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def dispatch(name: str, kernels: Mapping[str, Callable[..., Any]], reference: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `kernels[platform]` (keys: "gpu", "tpu") and falls back to `reference`.

    A kernel that cannot serve its arguments raises NotImplementedError while it is traced; that is said once.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        here = platform()
        kernel = kernels.get(here)
        if kernel is None:
            return reference(*args, **kwargs)
        try:
            return kernel(*args, **kwargs)
        except NotImplementedError as reason:
            if (name, here) not in _announced:
                _announced.add((name, here))
                warnings.warn(f"{name}: no {here} kernel for these arguments ({reason}); using XLA", stacklevel=2)
            return reference(*args, **kwargs)

    return call

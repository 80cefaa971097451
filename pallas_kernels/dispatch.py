"""Chooses an implementation: the platform's own kernel where one exists and serves the shapes, else the reference."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NamedTuple

import jax

ENVIRONMENT = "KVJAX_KERNELS"
BACKENDS = {"triton": "gpu", "mosaic_tpu": "tpu"}  # modules of an operation's folder, and what they compile for
INTERPRET = "-interpret"
CHOICES = ("default", "reference", *(backend + INTERPRET for backend in BACKENDS))

_choice = jax.make_user_context(None)  # jit traces again where it differs
_announced: set[tuple[str, str]] = set()
_operations: dict[str, tuple[str, ...]] = {}


class Implementation(NamedTuple):
    """What runs for an operation: "reference", a backend, or one in interpret mode; and why."""

    name: str
    why: str


def use(choice: str) -> AbstractContextManager[None]:
    """Within it, kernels are chosen so: functions under jit are traced again where the choice differs.

    Args:
        choice: "default" takes the platform's own kernels, "reference" plain XLA, and "triton-interpret" or
            "mosaic_tpu-interpret" runs that backend's kernels step by step on any platform, slowly, to try them. The
            environment variable KVJAX_KERNELS says the same for a process; this overrides it.

    Raises:
        ValueError: for another choice.
    """
    return _choice(_checked(choice, "use"))


def _checked(choice: str, source: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"{source}: kernels {choice!r}; accepted are {', '.join(CHOICES)}")
    return choice


def platform() -> str:
    """What is compiled for: the devices of the mesh whose `jax.shard_map` this is called in, else the default ones."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def implementation(operation: str) -> Implementation:
    """What an operation of this package takes here and now, unless its kernel cannot serve the arguments."""
    backends = _operations[operation]
    choice, source = _choice.value, "kvjax.pallas_kernels.use"
    if choice is None:
        source = ENVIRONMENT
        choice = _checked(os.environ.get(ENVIRONMENT) or "default", source)
    if choice == "reference":
        return Implementation("reference", f"{source} asks for it")
    if choice != "default":
        backend = choice.removesuffix(INTERPRET)
        if backend in backends:
            return Implementation(choice, f"{source} asks for it")
        return Implementation("reference", f"{source} asks for {choice}, of which there is none")
    here = platform()
    for backend in backends:
        if BACKENDS[backend] == here:
            return Implementation(backend, f"the platform is {here}")
    return Implementation("reference", f"the platform is {here}, for which there is no kernel")


def implementations() -> dict[str, Implementation]:
    """Of every operation, by name."""
    return {operation: implementation(operation) for operation in sorted(_operations)}


def dispatch(reference: Callable[..., Any], *backends: str) -> Callable[..., Any]:
    """A function that runs the kernel of the platform, if there is one among `backends`, and else `reference`.

    An operation's name is that of its reference, of its folder, and of the kernel in each backend's module of that
    folder, which is imported when first used. Kernels take the reference's arguments and `interpret`. One that cannot
    serve its arguments raises NotImplementedError while it is traced; that is said once, and the reference runs.
    """
    operation = reference.__name__
    _operations[operation] = backends

    def call(*args: Any, **kwargs: Any) -> Any:
        chosen, _ = implementation(operation)
        if chosen == "reference":
            return reference(*args, **kwargs)
        backend = chosen.removesuffix(INTERPRET)
        try:
            module = import_module(f"..{operation}.{backend}", __name__)
            return getattr(module, operation)(*args, interpret=chosen.endswith(INTERPRET), **kwargs)
        except NotImplementedError as reason:
            if (operation, chosen) not in _announced:
                _announced.add((operation, chosen))
                warnings.warn(
                    f"{operation}: no {chosen} kernel for these arguments ({reason}); using XLA", stacklevel=2
                )
            return reference(*args, **kwargs)

    return call

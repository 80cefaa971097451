"""Chooses which implementation of an operation runs: a kernel of the platform, or what XLA compiles anywhere."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from .traced_once import traced_once

ENVIRONMENT = "KVJAX_KERNELS"
# the name of a backend's modules -> the platform it compiles for
BACKENDS = {"cudnn": "gpu", "triton": "gpu", "mosaic_gpu": "gpu", "mosaic_tpu": "tpu", "xla": "any"}
OPTIONAL = {"mosaic_gpu"}  # backends that no device has shown to be faster: tried first if they are chosen
NOT_PALLAS = {"cudnn", "xla"}  # backends whose modules have no kernels of Pallas, which could be interpreted
INTERPRET = "-interpret"
CHOICES = (
    *("default", "reference", *BACKENDS),
    *(backend + INTERPRET for backend in BACKENDS if backend not in NOT_PALLAS),
)

_choice = jax.make_user_context(None)  # a part of what jit caches on: functions are traced anew for another choice
_warned: set[str] = set()  # messages
_operations: dict[str, tuple[str, ...]] = {}  # backends by operation, in order of trial


class DeclinedError(NotImplementedError):
    """A refusal that dispatch does not warn of, because the next backend is meant for the arguments."""


class Implementation(NamedTuple):
    """The implementation that an operation tries first, and the reason.

    Attributes:
        name: "reference", a backend, or a backend with the suffix "-interpret".
        why: one clause for a person to read.
    """

    name: str
    why: str


def use(choice: str) -> AbstractContextManager[None]:
    """Chooses kernels within a `with` block. A function under jit is traced again if the choice differs.

    Args:
        choice: "default" takes the platform's kernels, and "xla" where there are none. The name of a backend takes that
            backend and then "xla": "triton" is all kernels for GPUs but cuDNN. "mosaic_gpu" alone hands on to the
            platform's other backends. "triton-interpret", "mosaic_gpu-interpret" and "mosaic_tpu-interpret" run that
            backend's kernels step by step on any platform; they are slow and serve tests. "reference" runs the
            definitions, which hold every attention weight in memory. The environment variable KVJAX_KERNELS sets the
            same for a process; this function overrides it.

    Raises:
        ValueError: for another choice.
    """
    return _choice(_checked(choice, "use"))


def _checked(choice: str, source: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"{source}: kernels={choice!r}: expected one of {', '.join(CHOICES)}")
    return choice


def platform() -> str:
    """The platform that is compiled for: that of the mesh of the surrounding `jax.shard_map`, else the default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _backends(operation: str) -> tuple[list[str], str]:
    """The backends that an operation tries, in order, before its reference; and why."""
    backends = _operations[operation]
    choice, source = _choice.value, "kvjax.pallas_kernels.use"
    if choice is None:
        source = ENVIRONMENT
        choice = _checked(os.environ.get(ENVIRONMENT) or "default", source)
    if choice == "reference":
        return [], f"{source} asks for it"
    here, anywhere = platform(), [backend for backend in backends if BACKENDS[backend] == "any"]
    first = [choice] if choice in OPTIONAL and choice in backends and BACKENDS[choice] == here else []
    if choice != "default" and choice not in OPTIONAL:
        name = choice.removesuffix(INTERPRET)
        if name not in backends:
            return anywhere, f"{source} asks for {choice}, which this operation does not have"
        if choice == name and BACKENDS[name] not in (here, "any"):
            return anywhere, f"{source} asks for {choice}, and the platform is {here}"
        return list(dict.fromkeys([choice, *anywhere])), f"{source} asks for it"
    names = list(dict.fromkeys([*first, *(backend for backend in backends if BACKENDS[backend] == here)]))
    if not names:
        return anywhere, f"the platform is {here}, which has no kernel"
    why = f"{source} asks for it" if first else f"the platform is {here}"
    return names + anywhere, why + "".join(f", then {name}" for name in names[1:])


def implementation(operation: str) -> Implementation:
    """Returns what an operation of this package tries first, here and now. It may still refuse its arguments."""
    names, why = _backends(operation)
    return Implementation(names[0] if names else "reference", why)


def implementations() -> dict[str, Implementation]:
    """Returns what every operation tries first, by name of the operation."""
    return {operation: implementation(operation) for operation in sorted(_operations)}


def dispatch(reference: Callable[..., Any], *backends: str) -> Callable[..., Any]:
    """Returns a function that tries the platform's backends in the given order, then "xla", and the reference last.

    The reference defines the operation, which has its name. An operation without a backend "xla" runs its definition
    where it has no kernel: the definition is then what XLA should compile.

    A backend is the function of the operation's name in the module OPERATION/BACKEND.py, which is imported when it is
    first tried. It takes the reference's arguments, and a kernel of Pallas also `interpret`. A backend that cannot
    serve its arguments raises NotImplementedError while it is traced, and the next one is tried. One that cannot be
    imported is not there. Dispatch warns of that once per combination of reasons, unless it is `DeclinedError`. Other
    errors are not caught.

    Args:
        backends: keys of BACKENDS, in order of trial.
    """
    operation = reference.__name__
    _operations[operation] = backends

    @traced_once
    def attempt(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refusals = []
        for name in names:
            backend = name.removesuffix(INTERPRET)
            options = kwargs if backend in NOT_PALLAS else kwargs | {"interpret": name != backend}
            try:
                module = import_module(f"..{operation}.{backend}", __name__)
                result = getattr(module, operation)(*args, **options)
            except DeclinedError:
                continue
            except (NotImplementedError, ImportError) as reason:
                refusals.append(f"{name} ({reason})")
                continue
            _warn(operation, refusals, name)
            return result
        _warn(operation, refusals, "the reference")
        return reference(*args, **kwargs)

    @wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        return attempt(tuple(_backends(operation)[0]), args, kwargs)

    return call


def mapped(function: Callable[[Any], Array], xs: Any) -> Array:
    """Applies a function of operations to each item of arrays with a leading axis, and stacks the results.

    A GPU runs a kernel for all items at once, in a larger grid. Its loop would be started round by round by the host.
    Elsewhere one item follows the other.
    """
    return jax.vmap(function)(xs) if platform() == "gpu" else jax.lax.map(function, xs)


def _warn(operation: str, refusals: list[str], used: str) -> None:
    """Says once which backends refused the arguments, why, and what runs instead."""
    message = f"{operation}: not served by {', '.join(refusals)}; using {used}"
    if refusals and message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)

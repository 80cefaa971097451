"""The modes of JAX that kvjax computes in, whatever the caller has set.

Types and ranks of kvjax's arrays are declared, so the caller's rules for promoting them, and 64-bit types, have no part
in them. Prompts come from the host and answers go there, so a guard against transfers stops at kvjax's door. Arrays say
which mesh they lie on, and the one of `jax.set_mesh` may be another.
`jax.disable_jit`, `jax_debug_nans` and all other modes stay as the caller has set them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, AxisType

from .memory import memory_errors

T = TypeVar("T")
END: Final = object()  # of an iterator

_processes: set[int] = set()  # those in which kvjax has run: this one, and whose memory it has


@contextmanager
def own_modes() -> Iterator[None]:
    """Sets the modes within a block, or within the function that it decorates.

    Raises:
        MemoryError: the runtime could not allocate what a program needs.
        RuntimeError: in a process that was forked from one in which kvjax has run.
    """
    _processes.add(process := os.getpid())
    if len(_processes) > 1:
        _processes.remove(process)
        raise RuntimeError(
            "this process was forked from one in which kvjax has run; JAX would wait here for threads that it does not "
            'have: expected a process of its own, such as multiprocessing.get_context("spawn") starts'
        )
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.transfer_guard("allow"),
        _no_mesh(),
        memory_errors(),
    ):
        yield


def in_own_modes(values: Iterator[T]) -> Iterator[T]:
    """The same values, each of which is made in kvjax's modes. Between two of them the caller's hold."""
    while True:
        with own_modes():
            found = next(values, END)
        if found is END:
            return
        yield cast(T, found)


def _no_mesh() -> AbstractContextManager[Any]:
    """Sets no mesh if there is one, except within a program of the caller whose arrays are typed by the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return nullcontext()
    try:
        return jax.set_mesh(None)
    except ValueError:  # within a program of the caller, where nobody may change the devices
        auto = set(mesh.axis_types) == {AxisType.Auto}
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ())) if auto else nullcontext()

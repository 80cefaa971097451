"""Times what a device does, without the dispatch of its calls: kernels by CUPTI on GPUs, calls in a row elsewhere."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FLUSHED = 1 << 28  # bytes that are written between two calls, more than any cache holds
FLUSH = "atan2"  # an operation that no measured program has; XLA puts it into the name of its kernel


class Kernel(NamedTuple):
    """A kernel of a program.

    Attributes:
        launches: how often it runs.
        seconds: of all launches together.
    """

    name: str
    launches: int
    seconds: float


def has_cupti() -> bool:
    """Returns whether this process can time kernels one by one: on NVIDIA's GPUs."""
    return jax.default_backend() == "gpu" and "NVIDIA" in jax.devices()[0].device_kind


def kernels(call: Callable[..., Any], *arrays: Any) -> list[Kernel]:
    """The kernels of one call, the slowest first.

    Args:
        call: a function of `arrays`. It is called twice, so it donates none of them.

    Raises:
        RuntimeError: without a GPU of NVIDIA.
    """
    from jax.experimental.mosaic.gpu import profiler

    if not has_cupti():
        raise RuntimeError(f"kernels are timed by CUPTI on NVIDIA's GPUs; this is {jax.devices()[0].device_kind}")
    _, launches = profiler.measure(call, aggregate=False)(*arrays)
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for name, milliseconds in launches or []:
        taken[name].append(milliseconds / 1e3)
    found = [Kernel(name, len(each), sum(each)) for name, each in taken.items()]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def seconds(call: Callable[..., Any], sets: Sequence[Sequence[Any]], repeats: int) -> float:
    """The median time of a call.

    On GPUs it is the sum over the call's kernels. A kernel that writes FLUSHED bytes runs between two calls, so that
    no array is in a cache. Elsewhere it is the elapsed time of all `sets` in a row, divided by their number.

    Args:
        sets: arguments of `call`, so many that no cache holds them. GPUs use the first.
    """
    if not has_cupti():
        return _by_dispatch(call, sets, repeats)
    from jax.experimental.mosaic.gpu import profiler

    @jax.jit
    def flushed(zeros: Any, arrays: Any) -> Any:
        return call(*arrays), jnp.arctan2(zeros, jnp.float32(1))

    zeros = jnp.zeros(FLUSHED // 4, jnp.float32)
    measured = profiler.measure(flushed, aggregate=False, iterations=repeats)
    taken: Any = measured(zeros, sets[0])[1]  # of each iteration, the kernels with their milliseconds
    runs = taken if repeats > 1 else [taken]
    return statistics.median(sum(ms for name, ms in run if FLUSH not in name) for run in runs) / 1e3


def _by_dispatch(call: Callable[..., Any], sets: Sequence[Sequence[Any]], repeats: int) -> float:
    jitted = jax.jit(call)
    for arrays in sets:
        jax.block_until_ready(jitted(*arrays))
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        results = [jitted(*arrays) for arrays in sets]
        jax.block_until_ready(results)
        taken.append((time.perf_counter() - started) / len(sets))
    return statistics.median(taken)

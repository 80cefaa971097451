"""Checks the kernels against plain XLA in float32, and measures their share of a device's bandwidth and matrix units.

    python -m benchmarks.bench_kernels > bench_kernels.jsonl          # on a GPU or TPU, production shapes in bfloat16
    python -m benchmarks.bench_kernels --small                        # anywhere, as a check that it runs

The script first measures the device's own rates: bytes of a copy, read and written, and operations of a matrix product.
Times are those of `device_time.py`: of kernels alone on GPUs, of calls in a row elsewhere. The output is JSON
lines: the rates, and for each case the median of `--repeats`, the necessary bytes or operations divided by that time,
and their share of the device's rate, with a goal where there is one. A case that fails, or whose result differs from
XLA's, is not timed, and the program ends with an error after the other cases. Kernels that run only if they
are chosen (`mosaic_gpu`) have cases of their own, beside the default ones on the same arrays.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_time import has_cupti, seconds
from benchmarks.kernel_cases import CHOICES, Case, cases
from kvjax import pallas_kernels

ROTATED = 1 << 28  # bytes of all sets of arrays together, at least
RELATIVE = {"bfloat16": 1e-2, "float32": 1e-3}  # the largest relative error of a result, by the dtype of the arrays
ABSOLUTE = {"lse": 2e-3, "indices": 0.0}  # the largest difference of results that must be close one by one


def several(draw: Callable[[Any], Sequence[Any]]) -> list[Sequence[Any]]:
    """Sets of arrays, as many as no cache holds, but 16 at most. One is enough if kernels are timed one by one."""
    first = draw(jax.random.key(0))
    if has_cupti():
        return [first]
    count = -(-ROTATED // sum(x.nbytes for x in jax.tree.leaves(first)))
    return [first, *(draw(jax.random.key(i)) for i in range(1, min(max(count, 2), 16)))]


def rates(small: bool, repeats: int) -> dict[str, float]:
    """Bytes/s of a copy and operations/s of a product of matrices."""
    size, side = (1 << 22, 512) if small else (1 << 29, 8192)

    def block(key: Any) -> Sequence[Any]:
        return [jax.random.normal(key, (size,), jnp.bfloat16)]

    def matrices(key: Any) -> Sequence[Any]:
        return [jax.random.normal(k, (side, side), jnp.bfloat16) for k in jax.random.split(key)]

    copy = seconds(lambda x: x + 1, [block(jax.random.key(i)) for i in range(2)], repeats)
    product = seconds(jnp.dot, [matrices(jax.random.key(i)) for i in range(2)], repeats)
    return {"bytes": 2 * 2 * size / copy, "operations": 2 * side**3 / product}


def reference(case: Case, arrays: Sequence[Any]) -> dict[str, Any]:
    """The results of plain XLA in float32, which holds no array of the size of all attention weights."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arrays)
    with pallas_kernels.use("xla"), jax.default_matmul_precision("highest"):
        return jax.jit(case.call)(*wide)


def check(case: Case, arrays: Sequence[Any], expected: dict[str, Any]) -> dict[str, float]:
    """Returns the error of each result: the largest difference of "lse" and "indices", the relative error of others.

    The relative error is ||x - expected|| / ||expected||. A result that is no number has the error infinity.

    Raises:
        ValueError: if an error is more than rounding.
    """
    found, relative = {}, RELATIVE[jnp.dtype(arrays[0].dtype).name]
    with pallas_kernels.use(case.choice):
        results = jax.jit(case.call)(*arrays)
    for name, result in results.items():
        x, y = np.asarray(result, np.float64), np.asarray(expected[name], np.float64)
        error = np.linalg.norm(x - y) / np.linalg.norm(y) if name not in ABSOLUTE else np.max(np.abs(x - y))
        found[name] = float(error) if np.isfinite(error) else float("inf")
        allowed = ABSOLUTE.get(name, relative)
        if found[name] > allowed:
            raise ValueError(f"{case.name} {case.facts}: the error of {name} is {error:.2e}; allowed is {allowed:.2e}")
    return found


def served_by(case: Case, arrays: Sequence[Any]) -> str | None:
    """The name of the implementation that runs first; None if it was chosen and refuses the arguments."""
    with pallas_kernels.use(case.choice):
        name = pallas_kernels.implementations()[case.name].name
        chosen = name == case.choice
        return None if chosen and name not in jax.jit(case.call).lower(*arrays).as_text() else name


def measured(case: Case, rate: dict[str, float], repeats: int) -> dict[str, Any]:
    """The facts of a case: what served it, its errors, its time, and its share of the device's rate.

    Raises:
        ValueError: if a result is wrong.
    """
    sets = several(case.draw)
    by = served_by(case, sets[0])
    if by is None:
        return {"refused": f"{case.choice} does not serve these arguments here"}
    errors = check(case, sets[0], reference(case, sets[0]))
    with pallas_kernels.use(case.choice):
        taken = seconds(case.call, sets, repeats)
    amount, kind = case.work
    line = {"by": by, "errors": errors, "seconds": taken, f"{kind}_per_second": amount / taken}
    line |= {"of_device": amount / taken / rate[kind], "goal": case.goal}
    if case.rival is not None:
        line["rival_over_ours"] = seconds(case.rival, sets, repeats) / taken
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", help="operations; all by default")
    parser.add_argument("--choice", nargs="+", choices=CHOICES, default=CHOICES, help="whose cases; all by default")
    parser.add_argument("--small", action="store_true", help="sizes for any machine, in float32")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    device = jax.devices()[0]
    rate = rates(arguments.small, arguments.repeats)
    facts = {"device": device.device_kind, "jax": jax.__version__}
    print(json.dumps(facts | {f"{kind}_per_second": value for kind, value in rate.items()}), flush=True)
    failed = False
    for case in cases(arguments.small):
        if case.choice not in arguments.choice or (arguments.case and case.name not in arguments.case):
            continue
        line = {"case": case.name, **case.facts, "choice": case.choice}
        try:
            line |= measured(case, rate, arguments.repeats)
        except Exception as error:  # a compiler may raise anything, and the other cases are still to be measured
            line |= {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
            failed = True
        print(json.dumps(line), flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()

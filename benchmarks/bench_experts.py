"""Times the products of experts beside `jax.lax.ragged_dot`, on any device; the sides take turns.

    python -m benchmarks.bench_experts

The output is one JSON line per number of rows: the median seconds of each side, the median ratio of their times and its
quartiles, their temporaries in bytes, and the largest difference of their results.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.pallas_kernels import grouped_product


def measure(rows: int, matrices: jax.Array, repeats: int) -> dict[str, Any]:
    rng, (groups, inputs, _) = np.random.default_rng(rows), matrices.shape
    x = jnp.asarray(rng.normal(size=(rows, inputs)), matrices.dtype)
    sizes = jnp.asarray(np.bincount(rng.integers(0, groups, rows), minlength=groups), jnp.int32)
    sides = {"grouped_product": grouped_product, "ragged_dot": jax.lax.ragged_dot}
    programs = {name: jax.jit(side).lower(x, matrices, sizes).compile() for name, side in sides.items()}
    ours, theirs = (program(x, matrices, sizes) for program in programs.values())
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, program in programs.items():
            started = time.perf_counter()
            program(x, matrices, sizes).block_until_ready()
            seconds[name].append(time.perf_counter() - started)
    ratios = [other / own for own, other in zip(*seconds.values(), strict=True)]
    memory = {name: program.memory_analysis() for name, program in programs.items()}
    return {
        "rows": rows,
        "seconds": {name: median(times) for name, times in seconds.items()},
        "ratio": [median(ratios), *np.quantile(ratios, [0.25, 0.75]).tolist()],
        "temporaries": {name: found and found.temp_size_in_bytes for name, found in memory.items()},
        "difference": float(jnp.abs(ours - theirs).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[8, 64, 1024])
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=768)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    shape = arguments.groups, arguments.inputs, arguments.outputs
    matrices = jnp.asarray(np.random.default_rng(0).normal(size=shape), arguments.dtype)
    for rows in arguments.rows:
        print(json.dumps(measure(rows, matrices, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()

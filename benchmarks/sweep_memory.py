"""Measures what a process holds while it sweeps budgets and prompt lengths, each of which compiles programs of its own.

    python -m benchmarks.sweep_memory --budgets 500 --lengths 50

The output is a Markdown table: the number of requests so far, resident memory, and memory maps, of which Linux gives a
process 65,530 by default. `--keep` is the number of policies and lengths whose programs stay
(`kvjax.evaluation.programs.keep`). The model is random and has one layer, so that compiling takes most of the time.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from flax import nnx

import kvjax
from kvjax.evaluation import programs
from kvjax.models import Decoder, DecoderConfig, Rope

LENGTH, BUDGET, FIRST, NEW = 600, 64, 40, 2  # tokens: of prompts, of the second sweep's budget, of the least budget


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--budgets", type=int, default=500)
    arguments.add_argument("--lengths", type=int, default=50)
    arguments.add_argument(
        "--keep", type=int, help="policies and lengths whose programs stay; the default of `kvjax eval` without it"
    )
    given = arguments.parse_args()
    if given.keep is not None:
        programs.keep(given.keep)
    config = DecoderConfig("llama", 64, 32, 48, 4, 2, 8, (None,), Rope(1e4), 4096)
    params = Decoder(config, nnx.Rngs(0))
    text = np.random.default_rng(0).integers(0, config.vocab_size, LENGTH).tolist()
    requests = [(FIRST + i, LENGTH) for i in range(given.budgets)]
    requests += [(BUDGET, 20 + 10 * i) for i in range(given.lengths)]
    print("| requests | sweep | resident memory, MB | memory maps |\n|---:|---|---:|---:|")
    for number, (budget, length) in enumerate(requests, start=1):
        programs.make_room((budget, length))
        policy = kvjax.policies.h2o(budget)
        kvjax.generate(params, [text[:length]], policy=policy, max_new_tokens=NEW, eos=())
        if number % 25 == 0 or number == len(requests):
            sweep = "budgets" if number <= given.budgets else "lengths"
            print(f"| {number} | {sweep} | {resident() / 1e6:.0f} | {maps()} |", flush=True)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def maps() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


if __name__ == "__main__":
    main()

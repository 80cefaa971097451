"""Measures a burst of short prompts: an engine that reads four together beside one that reads each alone.

    python -m benchmarks.bench_bursts --model random

The models are the demo model, that of `bench_cpu.py` with 57 million random parameters, and one of SmolLM2-135M's
shape. All requests come at once and find free rows. The sides take turns; the script prints, for each answer's length,
the medians of the seconds until the last first token and until the last token, and the ratio within a turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

import kvjax
from benchmarks.bench_cpu import CPU, SMOLLM2, make_model
from kvjax.checkpoint.folder import DEMO
from kvjax.engine.device import Device
from kvjax.models import Decoder

MODELS = ("demo", "random", "smollm2")
MACHINES = {"random": CPU, "smollm2": replace(CPU, layers=30, sizes=SMOLLM2 | {"tie_embeddings": True})}
ANSWERS = (1, 16)  # tokens


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--model", choices=MODELS, default=MODELS[0])
    arguments.add_argument("--policy", default="full")
    arguments.add_argument("--requests", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=32, help="of each prompt")
    arguments.add_argument("--turns", type=int, default=9)
    given = arguments.parse_args()
    sizes = {"rows": given.requests, "max_prompt": max(128, 4 * given.tokens), "max_new_tokens": max(ANSWERS)}
    params = model(given.model)
    prompts = np.random.default_rng(0).integers(0, params.config.vocab_size, (given.requests, given.tokens)).tolist()
    print("| tokens of an answer | first tokens: together | alone | ratio | all tokens: together | alone | ratio |")
    print("|---:|---:|---:|---|---:|---:|---|")
    with kvjax.Engine(params, given.policy, **sizes) as engine:
        for new in ANSWERS:
            burst(engine, prompts, new)
            turns = [(burst(engine, prompts, new), alone(engine, prompts, new)) for _ in range(given.turns)]
            print(f"| {new} | " + " | ".join(row([(one[i], other[i]) for one, other in turns]) for i in (0, 1)) + " |")


def model(name: str) -> Decoder:
    if name == "demo":
        return kvjax.load(str(DEMO))[0]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), MACHINES[name], 1, 1)
        return kvjax.load(folder)[0]


def burst(engine: kvjax.Engine, prompts: list[list[int]], new: int) -> tuple[float, float]:
    """Seconds until every request has its first token, and until all answers have ended."""
    began = time.perf_counter()
    handles = engine.submit_all(prompts, range(len(prompts)), max_new_tokens=new, eos=())
    for handle in handles:
        next(handle.tokens())
    first = time.perf_counter() - began
    for handle in handles:
        handle.result()
    return first, time.perf_counter() - began


def alone(engine: kvjax.Engine, prompts: list[list[int]], new: int) -> tuple[float, float]:
    """The same burst to the engine, which reads each prompt alone."""
    with mock.patch.object(Device, "together", return_value=1):
        return burst(engine, prompts, new)


def row(pairs: list[tuple[float, float]]) -> str:
    """Medians of both sides, and the median of the ratios with the least and the most."""
    together, apart = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = [other / one for one, other in pairs]
    return (
        f"{together:.3f} s | {apart:.3f} s | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()

"""Measures the speed on a CPU of kvjax, of transformers, and of kvpress's SnapKV, with the same random weights.

    python -m benchmarks.bench_cpu --peer-python .venv-kvpress/bin/python > bench_cpu.jsonl

`bench_gpu.py` does the same on a GPU, with another model.

Each side is one process that loads the model once and serves one measurement at a time. The sides take turns, so that
other work on the machine affects both. goldens/make_goldens.py describes the environment of the peer; without
`--peer-python`, kvjax is measured alone. The output is JSON lines: every measurement, then medians and ratios. `first`
marks the first call of a program, which the medians leave out. `cold_seconds` is its time beyond that of later calls,
for kvjax mostly compilation. Tokens per second are those of all rows together. The first token comes from the prompt.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.bench_sides import SHARE, WINDOW

SEED = 0


@dataclass(frozen=True)
class Case:
    """One thing to measure. `policy` is its text; the peer has only the first two."""

    name: str
    policy: str
    peer: bool = False
    prompt: str = "{prompt}"  # tokens read, by the sizes of the run


CASES = (
    Case("full", "full", peer=True),
    Case("snapkv", "snapkv:budget={budget},window={window}", peer=True),
    Case("slots", "full", prompt="{budget} - {new}"),  # as many slots as a budget, without a policy
    Case("morphkv", "morphkv:budget={budget},window={window}", prompt="{budget}"),
    Case("morphkv_every_8", "morphkv:budget={budget},window={window},every=8", prompt="{budget}"),
)


@dataclass(frozen=True)
class Machine:
    """The measurements on a kind of machine.

    Attributes:
        platform: of JAX; torch calls a GPU "cuda".
        dtype: of weights and caches.
        sizes: of the decoder, by the names of `DecoderConfig`, and its number of layers.
        goals: decode tokens per second of the first over the second, by batch, at least.
    """

    platform: str
    dtype: str
    layers: int
    sizes: dict[str, Any]
    goals: tuple[tuple[tuple[str, str], tuple[str, str], dict[int, float]], ...]


CPU = Machine(
    "cpu",
    "float32",
    8,
    {"vocab_size": 32_000, "hidden_size": 512, "mlp_size": 1536, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64},
    (
        (("kvjax", "full"), ("peer", "full"), {1: 2.5, 8: 2.2}),
        (("kvjax", "snapkv"), ("peer", "snapkv"), {1: 2.5, 8: 1.6}),
        (("kvjax", "morphkv"), ("kvjax", "slots"), {1: 1 / 1.15, 8: 1 / 1.15}),
        (("kvjax", "morphkv_every_8"), ("kvjax", "slots"), {1: 1 / 1.03, 8: 1 / 1.03}),
    ),
)
GPU = Machine(  # Llama-3.1-8B's shape
    "gpu",
    "bfloat16",
    32,
    {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "mlp_size": 14_336,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
    },
    (
        (("kvjax", "full"), ("peer", "full"), {}),
        (("kvjax", "snapkv"), ("peer", "snapkv"), {1: 5, 8: 5}),
        (("kvjax", "morphkv"), ("kvjax", "slots"), {1: 1 / 1.03, 8: 1 / 1.03}),
        (("kvjax", "morphkv_every_8"), ("kvjax", "slots"), {1: 1 / 1.01, 8: 1 / 1.01}),
    ),
)
SMALL = replace(
    CPU, layers=2, sizes={**CPU.sizes, "vocab_size": 1000, "hidden_size": 64, "mlp_size": 128, "head_dim": 8}
)
SMOLLM2 = CPU.sizes | {"vocab_size": 49_152, "hidden_size": 576, "num_heads": 9, "num_kv_heads": 3}


def make_model(folder: Path, machine: Machine, batch: int, prompt: int) -> None:
    """Random weights in Hugging Face form, and prompts, read by both sides."""
    import jax
    import numpy as np
    from flax import nnx

    from kvjax.checkpoint import save_hf
    from kvjax.models import Decoder, DecoderConfig, Rope

    config = DecoderConfig(
        family="llama",
        windows=(None,) * machine.layers,
        rope=Rope(10_000.0),
        max_positions=32_768,
        **machine.sizes,
    )
    draw = jax.jit(lambda: Decoder(config, nnx.Rngs(SEED), machine.dtype))  # in one program
    save_hf(draw(), folder)
    np.save(folder / "prompts.npy", np.random.default_rng(SEED).integers(0, config.vocab_size, (batch, prompt)))


class Side:
    """A process that serves measurements."""

    def __init__(self, name: str, python: str, folder: Path, machine: Machine):
        self.name = name
        script = Path(__file__).with_name("bench_sides.py")
        command = [python, str(script), name, str(folder), machine.platform, machine.dtype]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            "JAX_ENABLE_COMPILATION_CACHE": "0",  # the first call is to be a cold one
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the other side's model is on the same GPU
        }
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __call__(self, request: dict[str, Any]) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the {self.name} side ended while measuring {request}; its error is above")
        return json.loads(answer)

    def close(self) -> None:
        self.process.communicate()


def tokens_read(case: Case, budget: int, arguments: argparse.Namespace) -> int:
    """The length of a case's prompt: its text is a difference of sizes of the run."""
    first, *rest = case.prompt.format(prompt=arguments.prompt, budget=budget, new=arguments.new).split(" - ")
    return int(first) - sum(map(int, rest))


def measurements(sides: list[Side], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every case on every side that has it, first once to compile, then `repeats` times in turns."""
    budget = int(arguments.prompt * SHARE)
    for repeat in range(arguments.repeats + 1):
        for batch in arguments.batch:
            for case in (case for case in CASES if case.name in arguments.case):
                request = asdict(case) | {
                    "policy": case.policy.format(budget=budget, window=WINDOW),
                    "budget": budget,
                    "batch": batch,
                    "prompt": tokens_read(case, budget, arguments),
                    "new": arguments.new,
                }
                for side in sides:
                    if side.name == "kvjax" or case.peer:
                        result = side(request)
                        yield {"side": side.name, "case": case.name, "batch": batch, "first": repeat == 0} | result


def summary(results: list[dict[str, Any]], machine: Machine) -> Iterator[dict[str, Any]]:
    """Medians of each side, case and batch, then the ratios beside their goals."""
    medians: dict[tuple[str, str, int], dict[str, float]] = {}
    for key in dict.fromkeys((r["side"], r["case"], r["batch"]) for r in results):
        own = [r for r in results if (r["side"], r["case"], r["batch"]) == key]
        first, later = own[0], own[1:]
        median = {
            name: statistics.median(r[name] for r in later)
            for name in ("prefill_seconds", "decode_tokens_per_second", "wall_seconds")
        }
        medians[key] = median | {"cold_seconds": first["wall_seconds"] - median["wall_seconds"]}
        yield {"median_of": len(later), "side": key[0], "case": key[1], "batch": key[2]} | medians[key]
    batches = dict.fromkeys(batch for *_, batch in medians)
    for over, under, goals in machine.goals:
        for batch in batches:
            if (*over, batch) in medians and (*under, batch) in medians:
                ours, other = medians[(*over, batch)], medians[(*under, batch)]
                ratio = ours["decode_tokens_per_second"] / other["decode_tokens_per_second"]
                line = {"ratio": " ".join(over), "over": " ".join(under), "batch": batch, "decode": ratio}
                if over[0] != under[0]:
                    line |= {"prefill": ours["prefill_seconds"] / other["prefill_seconds"], "prefill_goal": 1.0}
                yield line | {"decode_goal": goals.get(batch)}


def main(description: str | None = __doc__, machine: Machine = CPU) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="an interpreter that has torch, transformers and kvpress")
    parser.add_argument("--peer-only", action="store_true", help="leave kvjax out")
    names = [case.name for case in CASES]
    parser.add_argument("--case", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens in a prompt")
    parser.add_argument("--new", type=int, default=256, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=5, help="measurements beyond the first, which compiles")
    parser.add_argument("--threads", type=int, help="cores that both sides are confined to; on a CPU 2 by default")
    parser.add_argument("--folder", type=Path, help="the model's folder; made if absent, a temporary one by default")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--smollm2", action="store_true", help="a model of SmolLM2-135M's shape; on a CPU only")
    shape.add_argument("--small", action="store_true", help="a small model, on the CPU of any machine")
    arguments = parser.parse_args()
    if arguments.peer_only and not arguments.peer_python:
        parser.error("--peer-only needs --peer-python")
    if int(arguments.prompt * SHARE) <= max(WINDOW, arguments.new):
        parser.error(f"a quarter of --prompt must be more than the window of {WINDOW} and more than --new")

    if arguments.small:
        machine = SMALL
        os.environ["JAX_PLATFORMS"] = "cpu"
    # Inherited by both sides; XLA and OpenMP size their thread pools by it.
    threads = arguments.threads or (2 if machine is CPU else None)
    if machine is CPU and arguments.smollm2:
        machine = replace(CPU, layers=30, sizes=SMOLLM2 | {"tie_embeddings": True})
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        if not (folder / "prompts.npy").exists():
            # A process of its own, so that it does not hold a GPU's memory while the sides run.
            sizes = (folder, machine, max(arguments.batch), arguments.prompt)
            maker = multiprocessing.get_context("spawn").Process(target=make_model, args=sizes)
            maker.start()
            maker.join()
            if maker.exitcode:
                sys.exit(f"the weights could not be written to {folder}; the error is above")
        sides = [] if arguments.peer_only else [Side("kvjax", sys.executable, folder, machine)]
        if arguments.peer_python:
            sides.append(Side("peer", arguments.peer_python, folder, machine))
        results = []
        for result in measurements(sides, arguments):
            print(json.dumps(result), flush=True)
            results.append(result)
        for side in sides:
            side.close()
    for line in summary(results, machine):
        print(json.dumps(line))


if __name__ == "__main__":
    main()

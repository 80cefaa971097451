"""Measures `kvjax.Engine` beside `kvjax.generate` in static batches, on requests whose answers differ in length.

    python scripts/bench_engine.py --out runs/engine.jsonl
    python scripts/bench_engine.py --model kvjax/demo_model --max-prompt 384 --max-new-tokens 96 --out runs/demo.jsonl

The default model is the one of scripts/bench_cpu.py: 57 million random parameters. Prompts have lengths between 1/16 of
--max-prompt and --max-prompt, answers between 1/64 of --max-new-tokens and --max-new-tokens. Both are drawn
log-uniformly, so a few answers are much longer than the others. All requests are there from the beginning.

| side | what runs |
|---|---|
| static | `generate` on batches of `--rows` requests in their order; a batch ends with its longest answer |
| engine | the engine under the full cache, with the same number of rows |
| the policies | the engine under each policy, with as many rows as take the bytes of the full cache's rows |

The sides take turns, --turns times. Then all rows of an engine are busy with equal requests, and its time per step is
compared with that of `generate`. The output is a line per measurement, and a table of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench_cpu import CPU, make_model

import kvjax
from kvjax.engine import Handle
from kvjax.models import Decoder

POLICIES = ("morphkv:budget=256,window=32", "snapkv:budget=256,window=32")


@dataclass(frozen=True)
class Requested:
    """A request: a prompt, and the number of tokens of its answer."""

    prompt: list[int]
    new: int


@dataclass(frozen=True)
class Measured:
    """What a side took.

    Attributes:
        seconds: until the last answer.
        first: seconds from the beginning to the first token of each request; empty for static batches.
        between: seconds between one token of a request and the next.
    """

    seconds: float
    first: Sequence[float] = ()
    between: Sequence[float] = ()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--model", type=Path)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--requests", type=int, default=48)
    arguments.add_argument("--rows", type=int, default=8)
    arguments.add_argument("--max-prompt", type=int, default=2048)
    arguments.add_argument("--max-new-tokens", type=int, default=1024)
    arguments.add_argument("--policies", nargs="+", default=POLICIES)
    arguments.add_argument("--turns", type=int, default=3)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.model is None:
            make_model(Path(folder), CPU, 1, 1)
        params, _ = kvjax.load(given.model or folder)
    requests = drawn(given, params.config.vocab_size)
    sizes = {"max_prompt": given.max_prompt, "max_new_tokens": given.max_new_tokens}
    engines = {"engine": kvjax.Engine(params, "full", rows=given.rows, **sizes)}
    held = engines["engine"].stats().cache_bytes
    for policy in given.policies:
        one = kvjax.Engine(params, policy, rows=1, **sizes)
        rows = held // one.stats().cache_bytes
        one.close()
        engines[f"{policy}, {rows} rows"] = kvjax.Engine(params, policy, rows=rows, **sizes)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Measured]] = defaultdict(list)
    tokens = sum(request.new for request in requests)
    with given.out.open("a") as file:
        for turn in range(given.turns + 1):
            for side in ("static", *engines):
                took = static(params, requests, given.rows) if side == "static" else served(engines[side], requests)
                if turn:  # the first one compiles what `generate` runs
                    found[side].append(took)
                    line = {"side": side, "turn": turn, "requests": len(requests), "tokens": tokens}
                    print(json.dumps(line | described(took, tokens)), file=file, flush=True)
        print(table(found, tokens))
        ratios = [steps(params, engines["engine"], given) for _ in range(given.turns + 1)][1:]
        print(json.dumps({"side": "step over bare step", "ratios": ratios}), file=file)
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"time of a step, engine over generate: {middle:.3f} ({low:.3f} to {high:.3f})")
    for engine in engines.values():
        engine.close()


def drawn(given: argparse.Namespace, vocab: int) -> list[Requested]:
    """The requests of a run."""
    rng = np.random.default_rng(given.seed)

    def lengths(most: int, share: int) -> list[int]:
        low = max(1, most // share)
        return np.exp(rng.uniform(np.log(low), np.log(most), given.requests)).astype(int).tolist()

    prompts, answers = lengths(given.max_prompt, 16), lengths(given.max_new_tokens, 64)
    return [Requested(rng.integers(0, vocab, n).tolist(), new) for n, new in zip(prompts, answers, strict=True)]


def static(params: Decoder, requests: Sequence[Requested], rows: int) -> Measured:
    """Batches of `generate`, each of which ends with its longest answer."""
    began = time.perf_counter()
    for i in range(0, len(requests), rows):
        batch = requests[i : i + rows]
        most = max(request.new for request in batch)
        kvjax.generate(params, [request.prompt for request in batch], max_new_tokens=most, eos=())
    return Measured(time.perf_counter() - began)


def served(engine: kvjax.Engine, requests: Sequence[Requested]) -> Measured:
    """All requests at once."""

    async def follow(handle: Handle) -> list[float]:
        return [time.perf_counter() async for _ in handle]

    async def everything() -> list[list[float]]:
        handles = [engine.submit(request.prompt, max_new_tokens=request.new, eos=()) for request in requests]
        return await asyncio.gather(*map(follow, handles))

    began = time.perf_counter()
    times = asyncio.run(everything())
    between = [gap for row in times for gap in np.diff(row).tolist()]
    return Measured(time.perf_counter() - began, [row[0] - began for row in times], between)


def steps(params: Decoder, engine: kvjax.Engine, given: argparse.Namespace) -> float:
    """The engine's time per step over that of `generate`, with all rows busy and no prompt to read."""
    rng = np.random.default_rng(given.seed)
    prompts = rng.integers(0, params.config.vocab_size, (given.rows, given.max_prompt // 2))
    new = given.max_new_tokens // 2
    bare = kvjax.generate(params, prompts, max_new_tokens=new, eos=()).stats.decode_seconds / (new - 1)

    async def last_steps() -> list[float]:
        handles = [engine.submit(prompt, max_new_tokens=new, eos=()) for prompt in prompts]
        async for _ in handles[-1]:  # the last one to be admitted has its first token: nothing is read any more
            break
        began, before = time.perf_counter(), engine.stats().steps
        await handles[0]  # the first one to end
        return [time.perf_counter() - began, engine.stats().steps - before]

    seconds, count = asyncio.run(last_steps())
    return seconds / count / bare


def described(took: Measured, tokens: int) -> dict[str, Any]:
    """A measurement as a JSON object."""
    quantiles = {
        f"{name}_p{q}": round(float(np.percentile(values, q)), 4)
        for name, values in (("first", took.first), ("between", took.between))
        if values
        for q in (50, 99)
    }
    return {"seconds": round(took.seconds, 2), "tokens_per_second": round(tokens / took.seconds, 1)} | quantiles


def table(found: dict[str, list[Measured]], tokens: int) -> str:
    """Medians of all turns; tokens per second beside static batches."""
    base = statistics.median(took.seconds for took in found["static"])
    rows = [
        "| side | tokens/s | ratio | first token, p50 / p99 | between tokens, p50 / p99 |",
        "|---|---:|---:|---:|---:|",
    ]
    for side, measured in found.items():
        seconds = statistics.median(took.seconds for took in measured)
        cells = [f"{tokens / seconds:.1f}", f"{base / seconds:.2f}"]
        for values in ([took.first for took in measured], [took.between for took in measured]):
            p50, p99 = (
                statistics.median(float(np.percentile(x, q)) for x in values) if values[0] else float("nan")
                for q in (50, 99)
            )
            cells.append(f"{p50:.3f} s / {p99:.3f} s" if values[0] else "")
        rows.append(f"| {side} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()

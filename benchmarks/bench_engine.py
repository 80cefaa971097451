"""Measures `kvjax.Engine` beside `kvjax.generate` in static batches, and transformers' continuous batching.

    python -m benchmarks.bench_engine --out runs/engine.jsonl               # hours on two cores; a second call goes on
    python -m benchmarks.bench_engine --out /tmp/try.jsonl --rehearsal      # minutes, to see that everything runs

The models are that of `bench_cpu.py`, which has 57 million random parameters, and the demo model; for GPUs 8 layers of
an 8B's shape (--models 8b). All requests are there from the beginning. Lengths are drawn log-uniformly.

| load | prompts of up to 2,048 tokens | answers of up to 1,024 |
|---|---|---|
| mixed | from 128 | from 16: a few are much longer than the others |
| long | from 128 | from 512 |
| chat | from 256 | from 64 |

| side | what runs |
|---|---|
| static | `generate` on batches of `--rows` requests in their order; a batch ends with its longest answer |
| engine | the engine under the full cache, with the same number of rows |
| the policies | the engine under each policy, whose rows take the bytes of the full cache's; at most one per request |
| transformers | its continuous batching under the full cache, with the same number of rows |
| step | the engine's time per step over that of `generate`, with all rows busy, no prompt to read, and equal shapes |

The sides take turns, --turns times; --without names some that are left out. Each measurement is a line of --out, and a
later call with the same settings makes those that are missing. At the end the script prints a table of medians for each
model and load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from benchmarks import bench_decode
from benchmarks.bench_cpu import CPU, make_model
from kvjax.checkpoint.folder import DEMO
from kvjax.engine import Handle
from kvjax.models import Decoder
from kvjax.runtime.gpu_flags import set_gpu_flags

MODELS = ("random", "demo", "8b")
POLICIES = ("morphkv:budget=256,window=32", "snapkv:budget=256,window=32")
SIDES = ("static", "engine", "transformers", "step")
LOADS = {"mixed": (16, 64), "long": (16, 2), "chat": (8, 16)}  # the longest prompt and answer over the shortest
Side = Callable[[], "Measured"]


@dataclass(frozen=True)
class Settings:
    """The settings that two measurements must have in common to be compared.

    Attributes:
        model: a name of MODELS.
        load: a name of LOADS.
        requests: their number.
        rows: of static batches, and of engines under the full cache.
        max_prompt, max_new_tokens: the longest prompt and answer.
        seed: of the requests.
    """

    model: str
    load: str
    requests: int
    rows: int
    max_prompt: int
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class Requested:
    """A request: a prompt, and the number of tokens of its answer."""

    prompt: list[int]
    new: int


@dataclass(frozen=True)
class Measured:
    """The measurements of a side.

    Attributes:
        seconds: until the last answer; for steps, the time of one over that of a bare one.
        first: seconds from the beginning to the first token of each request; empty for static batches.
        between: seconds between one token of a request and the next.
    """

    seconds: float
    first: Sequence[float] = ()
    between: Sequence[float] = ()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=MODELS[:2])
    arguments.add_argument("--loads", nargs="+", choices=LOADS, default=("mixed", "long"))
    arguments.add_argument("--requests", type=int, default=48)
    arguments.add_argument("--rows", type=int, default=8)
    arguments.add_argument("--max-prompt", type=int, default=2048)
    arguments.add_argument("--max-new-tokens", type=int, default=1024)
    arguments.add_argument("--policies", nargs="+", default=POLICIES)
    arguments.add_argument("--without", nargs="+", choices=SIDES, default=(), help="sides that are not measured")
    arguments.add_argument("--turns", type=int, default=3)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--rehearsal", action="store_true", help="small models, and few short requests")
    given = arguments.parse_args()
    if given.rehearsal:
        small = {"models": MODELS[1:], "requests": 6, "rows": 2, "max_prompt": 64, "max_new_tokens": 32, "turns": 1}
        given = argparse.Namespace(**vars(given) | small)
        given.policies = ["morphkv:budget=16,window=4", "snapkv:budget=16,window=4"]
    set_gpu_flags()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for model in given.models:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            if model == "random":
                make_model(Path(folder), CPU, 1, 1)
            Bench(given, model, DEMO if model == "demo" else Path(folder), stack).run()


class Bench:
    """The measurements of one model. Whatever takes memory is made when it is first needed."""

    def __init__(self, given: argparse.Namespace, model: str, folder: Path, stack: ExitStack) -> None:
        self.given, self.model, self.folder, self.stack = given, model, folder, stack
        eight = bench_decode.Bench(given.rehearsal, repeats=1, layers=8)
        self.params = eight.params if model == "8b" else kvjax.load(str(folder))[0]
        self.made: dict[str, Any] = {}
        self.warm: set[str] = set()

    def run(self) -> None:
        given = self.given
        for load in given.loads:
            settings = Settings(
                self.model, load, given.requests, given.rows, given.max_prompt, given.max_new_tokens, given.seed
            )
            requests = drawn(settings, self.params.config.vocab_size)
            tokens = sum(request.new for request in requests)
            sides = self.sides(settings, requests)
            for turn in range(given.turns):
                done = {(line["side"], line["turn"]) for line in lines_of(given.out, settings)}
                for side, measure in sides.items():
                    if (side, turn) in done:
                        continue
                    line = asdict(settings) | {"side": side, "turn": turn, "tokens": tokens}
                    try:
                        if side in ("static", "step") and (load + side) not in self.warm:
                            measure()  # compiles what `generate` runs
                            self.warm.add(load + side)
                        line |= described(measure(), tokens if side != "step" else 0)
                    except (ImportError, NotImplementedError, RuntimeError) as error:
                        if side != "transformers":
                            raise
                        line |= {"error": f"{type(error).__name__}: {error}"[:500]}
                    write(given.out, line)
            print(f"\n{self.model}, {load}: {tokens:,} tokens of {len(requests)} answers\n")
            print(table(lines_of(given.out, settings)), flush=True)

    def sides(self, settings: Settings, requests: Sequence[Requested]) -> dict[str, Side]:
        """Returns what is measured, by name."""
        given, config = self.given, self.params.config
        sizes = {"length": given.max_prompt, "new_tokens": given.max_new_tokens, "dtype": self.params.embed.dtype}
        held = kvjax.plan_cache(config, kvjax.policies.full(), batch=given.rows, **sizes).nbytes
        sides: dict[str, Side] = {
            "static": lambda: static(self.params, requests, given.rows),
            "engine": partial(self.answered, "full", given.rows, requests),
        }
        for policy in given.policies:
            one = kvjax.plan_cache(config, kvjax.policies.parse(policy), batch=1, **sizes).nbytes
            rows = min(held // one, len(requests))
            sides[f"{policy}, {rows} rows"] = partial(self.answered, policy, rows, requests)
        sides["transformers"] = lambda: continuous(self.peer(), requests, given)
        if settings.load == "mixed":
            sides["step"] = lambda: steps(self.params, self.engine("full", given.rows), given)
        return {name: side for name, side in sides.items() if name not in given.without}

    def answered(self, policy: str, rows: int, requests: Sequence[Requested]) -> Measured:
        return served(self.engine(policy, rows), requests)

    def engine(self, policy: str, rows: int) -> kvjax.Engine:
        """An engine, which stays."""
        sizes = {"rows": rows, "max_prompt": self.given.max_prompt, "max_new_tokens": self.given.max_new_tokens}
        return self._once(policy, lambda: self.stack.enter_context(kvjax.Engine(self.params, policy, **sizes)))

    def peer(self) -> Any:
        """The same model in transformers."""
        if self.model == "8b":
            raise NotImplementedError("transformers has no folder of this model")
        from transformers import AutoModelForCausalLM

        load = partial(AutoModelForCausalLM.from_pretrained, self.folder, dtype="float32")
        return self._once("transformers", lambda: load(attn_implementation="sdpa").eval())

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        return self.made[name] if name in self.made else self.made.setdefault(name, make())


def lines_of(path: Path, settings: Settings) -> list[dict[str, Any]]:
    """The measurements of a file with these settings. A line that was not written to its end does not count."""
    found, wanted = [], asdict(settings)
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if wanted.items() <= line.items():
            found.append(line)
    return found


def write(path: Path, line: dict[str, Any]) -> None:
    """Appends a measurement, after whatever an earlier call did not write to its end."""
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        print("\n" * torn + json.dumps(line), file=file)


def drawn(given: Settings, vocab: int) -> list[Requested]:
    """The requests of a load."""
    rng = np.random.default_rng(given.seed)

    def lengths(most: int, share: int) -> list[int]:
        low = max(1, most // share)
        return np.exp(rng.uniform(np.log(low), np.log(most), given.requests)).astype(int).tolist()

    prompts, answers = map(lengths, (given.max_prompt, given.max_new_tokens), LOADS[given.load])
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


def continuous(model: Any, requests: Sequence[Requested], given: argparse.Namespace) -> Measured:
    """All requests at once, to transformers."""
    from benchmarks.transformers_batching import answered

    prompts, new = [request.prompt for request in requests], [request.new for request in requests]
    seconds, times = answered(model, prompts, new, rows=given.rows, longest=given.max_prompt + given.max_new_tokens)
    between = [gap for row in times for gap in np.diff(row).tolist()]
    return Measured(seconds, [row[0] for row in times], between)


def steps(params: Decoder, engine: kvjax.Engine, given: argparse.Namespace) -> Measured:
    """The engine's time per step over that of `generate`, with all rows busy and no prompt to read.

    All requests are the longest, so that both caches have the same number of slots: a step on a CPU reads all of them.
    """
    rng = np.random.default_rng(given.seed)
    prompts = rng.integers(0, params.config.vocab_size, (given.rows, given.max_prompt))
    new = given.max_new_tokens
    bare = kvjax.generate(params, prompts, max_new_tokens=new, eos=()).stats.decode_seconds / (new - 1)

    async def last_steps() -> list[float]:
        handles = [engine.submit(prompt, max_new_tokens=new, eos=()) for prompt in prompts]
        async for _ in handles[-1]:  # the last one to be admitted has its first token: nothing is read any more
            break
        began, before = time.perf_counter(), engine.stats().steps
        await handles[0]  # the first one to end
        return [time.perf_counter() - began, engine.stats().steps - before]

    seconds, count = asyncio.run(last_steps())
    return Measured(seconds / count / bare)


def described(took: Measured, tokens: int) -> dict[str, Any]:
    """A measurement as a JSON object. `tokens` are those of all answers, and 0 for a ratio of steps."""
    if not tokens:
        return {"ratio": round(took.seconds, 4)}
    quantiles = {
        f"{name}_p{q}": round(float(np.percentile(values, q)), 4)
        for name, values in (("first", took.first), ("between", took.between))
        if len(values)
        for q in (50, 99)
    }
    return {"seconds": round(took.seconds, 2), "tokens_per_second": round(tokens / took.seconds, 1)} | quantiles


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Medians of all turns, and the ratio of tokens per second to that of static batches in the same turn."""
    rows = [
        "| side | tokens/s | over static (least to most) | first token, p50 / p99 | between tokens, p50 / p99 |",
        "|---|---:|---:|---:|---:|",
    ]
    static = {line["turn"]: line["tokens_per_second"] for line in lines if line["side"] == "static"}
    for side in dict.fromkeys(line["side"] for line in lines):
        of = [line for line in lines if line["side"] == side]
        good = [line for line in of if "error" not in line]
        if side == "step":
            ratios = [line["ratio"] for line in good]
            rows.append(f"| step over a bare step | | {spread(ratios)} | | |")
            continue
        if not good:
            rows.append(f"| {side} | {of[0]['error'].splitlines()[0]} | | | |")
            continue
        middle = partial(median, good)
        ratios = [line["tokens_per_second"] / static[line["turn"]] for line in good if line["turn"] in static]
        cells = [f"{middle('tokens_per_second'):.1f}", spread(ratios)]
        for name in ("first", "between"):
            known = f"{name}_p50" in good[0]
            cells.append(f"{middle(f'{name}_p50'):.3f} s / {middle(f'{name}_p99'):.3f} s" if known else "")
        rows.append(f"| {side} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def median(lines: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(line[name] for line in lines)


def spread(ratios: Sequence[float]) -> str:
    """A median, the least and the most."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""


if __name__ == "__main__":
    main()

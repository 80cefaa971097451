"""Measures the answers per second of `kvjax eval` on the demo model, and of a loop that asks one question at a time.

    python -m benchmarks.bench_eval --length 512 --examples 8 --budgets 0.5 0.25 0.1

The script checks that both give the same answers, and it compiles all programs before it starts the clock. The loop
prefills the context again for each question and budget, in a batch of one. The output is one JSON line per setting.

    python -m benchmarks.bench_eval --prefill --length 1024 --budgets 0.5 0.25 0.1

With `--prefill`, it measures the prefill that twelve presets share at these budgets, on the random model of
`bench_cpu.py`, against the prefill of the full cache alone. The two take turns. Each is measured in wall-clock
time and in the processor time of this process, which other work on the machine affects less.

    python -m benchmarks.bench_eval --refill --length 128 --examples 96 --policy morphkv:budget=64,window=8 --repeats 5

With `--refill`, it measures one policy on answers of very different lengths: draws at a temperature of 5 end after one
token or after hundreds. Rows that are refilled and padded batches take turns and must give the same answers. A line per
turn has the wall-clock and processor seconds of both, and the last one the ratios.

    python -m benchmarks.bench_eval --refill --model MODEL --data DATA --task ruler/niah_single_2 --temperature 1.2 ...

measures them on another model and task, as `kvjax eval` takes them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

import kvjax
from benchmarks.bench_cpu import CPU
from kvjax.decoding.sampling import Greedy, Sampler
from kvjax.evaluation.asking import Asker
from kvjax.evaluation.batches import Reading, ReadingBatch, batches, readings
from kvjax.evaluation.entries import SETTINGS
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item, read_items
from kvjax.evaluation.model import load_model
from kvjax.models import Decoder, DecoderConfig, Rope
from kvjax.policy import Policy

Tokens = dict[str, list[int]]
Answers = dict[tuple[Policy, str, str, int], list[int]]


def timed(runs: Sequence[Callable[[], Answers]], repeats: int) -> list[tuple[Answers, float]]:
    """The answers and the shortest time of each run, in seconds. The runs take turns, after one run each to compile."""
    answers = [run() for run in runs]
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for i, run in enumerate(runs):
            started = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - started)
    return list(zip(answers, best, strict=True))


PRESETS = (
    "full",
    "streaming_llm:budget={budget}",
    "h2o:budget={budget}",
    "tova:budget={budget}",
    "snapkv:budget={budget}",
    "pyramidkv:budget={budget}",
    "morphkv:budget={budget}",
    "expected_attention:budget={budget}",
    "criticalkv:base=snapkv,base.budget={budget}",
    "knorm:budget={budget}",
    "keydiff:budget={budget}",
    "lagkv:budget={budget}",
)


def shared_prefill(length: int, budgets: Sequence[float], repeats: int, layers: int) -> None:
    """Prints the times of the prefill that all presets share, and of the prefill of the full cache."""
    config = DecoderConfig("llama", windows=(None,) * layers, rope=Rope(10_000.0), max_positions=32_768, **CPU.sizes)
    params = jax.jit(lambda: Decoder(config, nnx.Rngs(0), "float32"))()
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, (1, length))
    grid = list(dict.fromkeys(text.format(budget=budget) for text in PRESETS for budget in budgets))

    def seconds(read: Callable[[], Any]) -> tuple[float, float]:
        wall, processor = time.perf_counter(), time.process_time()
        jax.block_until_ready(read())
        return time.perf_counter() - wall, time.process_time() - processor

    reads: dict[str, Callable[[], Any]] = {
        "full, by prefill": lambda: kvjax.prefill(params, prompt, policy="full"),
        "full, by prefill_each": lambda: list(kvjax.prefill_each(params, prompt, policies=["full"])),
        f"{len(grid)} policies": lambda: list(kvjax.prefill_each(params, prompt, policies=grid)),
    }
    for turn in range(repeats + 1):
        for name, read in reads.items():
            wall, processor = seconds(read)
            line = {"read": name, "turn": turn, "wall_seconds": wall, "processor_seconds": processor}
            print(json.dumps(line | {"compiles": turn == 0}), flush=True)


def refilled(ask: Asker, asked: Sequence[ReadingBatch], policy: Policy, repeats: int) -> None:
    """Prints the times of padded batches and of rows that are refilled."""

    def padded() -> Tokens:
        return {
            one.item.example.id: answer.tokens
            for batch in asked
            for _, answers, _ in ask(batch, [policy])
            for reading, mine in zip(batch.readings, answers, strict=True)
            for one, answer in zip(reading.asks, mine, strict=True)
        }

    def refill() -> Tokens:
        found = ask.refilled(iter(asked), policy, asked[0].rows)
        return {ended.reading.asks[ended.index].item.example.id: ended.answer.tokens for ended in found}

    ratios, lengths = [], np.zeros(0)
    for turn in range(repeats + 1):
        seconds, processor, answers = [], [], []
        for side in (padded, refill):
            started, used = time.perf_counter(), time.process_time()
            answers.append(side())
            seconds.append(time.perf_counter() - started)
            processor.append(time.process_time() - used)
        assert answers[0] == answers[1]
        lengths = np.array(sorted(map(len, answers[0].values())))
        if turn:  # the first one compiles
            ratios.append(seconds[0] / seconds[1])
            line = {"turn": turn, "padded": seconds[0], "refilled": seconds[1]}
            print(json.dumps(line | {"padded_cpu": processor[0], "refilled_cpu": processor[1]}), flush=True)
    facts = {
        "answers": len(lengths),
        "rows": asked[0].rows,
        "tokens": np.percentile(lengths, [0, 50, 90, 100]).tolist(),
    }
    print(json.dumps(facts | {"median": float(np.median(ratios)), "ratios": ratios}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="tokens per prompt")
    parser.add_argument("--examples", type=int, default=4, help="texts per task; there are seven tasks")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="number of timed runs, of which the fastest counts")
    parser.add_argument("--policy", default="snapkv:budget={budget}")
    parser.add_argument(
        "--budgets", type=float, nargs="+", default=[0.25], help="budgets, for which eval prefills a prompt once"
    )
    parser.add_argument("--prefill", action="store_true", help="measure the shared prefill of twelve presets")
    parser.add_argument("--refill", action="store_true", help="measure rows that are refilled on one policy")
    parser.add_argument("--new-tokens", type=int, default=512, help="most tokens of an answer for --refill")
    parser.add_argument("--model", default="demo", help="for --refill")
    parser.add_argument("--data", help="the folder of the texts, for --refill")
    parser.add_argument("--task", default="demo/needle", help="for --refill")
    parser.add_argument("--temperature", type=float, default=5.0, help="of the draws, for --refill")
    parser.add_argument("--layers", type=int, default=CPU.layers, help="layers of the model for --prefill")
    args = parser.parse_args()
    if args.prefill:
        shared_prefill(args.length, args.budgets, args.repeats, args.layers)
        return
    tasks = [{"name": args.task if args.refill else "demo/*", "lengths": [args.length]}]
    source = {"model": args.model, "data": args.data} if args.refill else {}
    source |= {"budgets": args.budgets} if "{budget}" in args.policy else {}
    grid = Grid.of({"tasks": tasks, "limit": args.examples, "policies": [args.policy]} | source)
    params, tokenizer = load_model(grid)
    items = [item for item in read_items(grid, tokenizer, params.config.max_positions) if isinstance(item, Item)]
    if args.refill:
        sampled = Asker(params, tokenizer, Sampler(temperature=args.temperature))
        made = readings([replace(item, new_tokens=args.new_tokens) for item in items], "before")
        policy = kvjax.policies.parse(args.policy.format(budget=args.budgets[0]))
        refilled(sampled, batches(made, lambda _: args.batch), policy, args.repeats)
        return
    policies = [kvjax.policies.parse(args.policy.format(budget=budget)) for budget in args.budgets]
    ask = Asker(params, tokenizer, Greedy())

    def answers(made: Sequence[Reading], rows: int, sweeps: Sequence[Sequence[Policy]]) -> Answers:
        found: Answers = {}
        for sweep in sweeps:
            for batch in batches(made, lambda _: rows):
                for i, marked, _ in ask(batch, sweep):
                    for reading, mine in zip(batch.readings, marked, strict=True):
                        for asked, answer in zip(reading.asks, mine, strict=True):
                            key = sweep[i], asked.item.task.name, asked.item.example.id, asked.index
                            found[key] = answer.tokens
        return found

    for question in SETTINGS:
        together = readings(items, question)
        whole = readings(items, question, whole=True)
        single = [replace(reading, asks=(asked,)) for reading in whole for asked in reading.asks]
        alone = [[policy] for policy in policies]
        runs = [partial(answers, together, args.batch, [policies]), partial(answers, single, 1, alone)]
        (ours, seconds), (theirs, loop_seconds) = timed(runs, args.repeats)
        assert ours == theirs
        facts = {"question": question, "length": args.length, "policy": args.policy, "budgets": args.budgets}
        facts["answers"] = len(ours)
        rates = {"eval_per_second": len(ours) / seconds, "loop_per_second": len(ours) / loop_seconds}
        print(json.dumps(facts | rates | {"ratio": loop_seconds / seconds}), flush=True)


if __name__ == "__main__":
    main()

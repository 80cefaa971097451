"""Answers a second of `kvjax eval` on the demo model, beside a loop that asks one question at a time.

    python scripts/bench_eval.py --length 512 --examples 4

Both give the same answers (that is checked), and nothing is compiled while they are timed. The loop reads the context
anew for each question, in a batch of one. Prints one JSON line for each setting.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import kvjax
from kvjax.evaluation.asking import Asker
from kvjax.evaluation.batches import Reading, batches, readings
from kvjax.evaluation.grid import SETTINGS, Grid
from kvjax.evaluation.items import Item, read_items
from kvjax.evaluation.model import load_model
from kvjax.sampling import Greedy

Answers = dict[tuple[str, str, int], list[int]]


def timed(runs: Sequence[Callable[[], Answers]], repeats: int) -> list[tuple[Answers, float]]:
    """What each answers, and the fewest seconds that it takes; in turns, after each has run once to compile."""
    answers = [run() for run in runs]
    best = [float("inf")] * len(runs)
    for _ in range(repeats):
        for i, run in enumerate(runs):
            started = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - started)
    return list(zip(answers, best, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--examples", type=int, default=4, help="texts of each of the seven tasks")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many")
    parser.add_argument("--policy", default="snapkv:budget=0.25")
    args = parser.parse_args()
    tasks = [{"name": "demo/*", "lengths": [args.length]}]
    grid = Grid.of({"tasks": tasks, "limit": args.examples, "policies": [args.policy]})
    params, tokenizer = load_model(grid)
    items = [item for item in read_items(grid, tokenizer, params.config.max_positions) if isinstance(item, Item)]
    policy, ask = kvjax.policies.parse(args.policy), Asker(params, tokenizer, Greedy())

    def answers(made: Sequence[Reading], rows: int) -> Answers:
        found: Answers = {}
        for batch in batches(made, lambda _: rows):
            ((marked, _),) = ask(batch, [policy])
            for reading, mine in zip(batch.readings, marked, strict=True):
                for asked, answer in zip(reading.asks, mine, strict=True):
                    found[asked.item.task.name, asked.item.example.id, asked.index] = answer.tokens
        return found

    for question in SETTINGS:
        together = readings(items, question)
        whole = readings(items, question, whole=True)
        single = [replace(reading, asks=(asked,)) for reading in whole for asked in reading.asks]
        runs = [partial(answers, together, args.batch), partial(answers, single, 1)]
        (ours, seconds), (theirs, loop_seconds) = timed(runs, args.repeats)
        assert ours == theirs
        facts = {"question": question, "length": args.length, "policy": args.policy, "answers": len(ours)}
        rates = {"eval_per_second": len(ours) / seconds, "loop_per_second": len(ours) / loop_seconds}
        print(json.dumps(facts | rates | {"ratio": loop_seconds / seconds}), flush=True)


if __name__ == "__main__":
    main()

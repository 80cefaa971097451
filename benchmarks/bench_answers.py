"""Measures the speed of long answers under policies that evict while decoding, beside the full cache.

    python -m benchmarks.bench_answers MODEL --out runs/answers

The requests and policies are those of `measure_answers.py`. All rows of a batch decode the same number of tokens, with
no end token, so that every policy does the same work. Policies take turns, and compile time is not counted. A turn is
appended to OUT/speed.jsonl at its end, one line per policy; a second call with the same options measures the turns
that are missing. The output is the table of all turns: the median tokens per second of the batch, its ratio to the
first policy's in the same turn with the smallest and largest, and the bytes of a row's cache.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import kvjax
from benchmarks.measure_answers import POLICIES, REQUESTS, SAMPLER, prompt_of
from benchmarks.measured_lines import MeasuredLines


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("model")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--tokens", type=int, default=1024, help="of each answer")
    arguments.add_argument("--requests", type=int, default=len(REQUESTS))
    arguments.add_argument("--budget", type=int, default=256)
    arguments.add_argument("--policies", nargs="+", default=POLICIES)
    arguments.add_argument("--turns", type=int, default=3)
    given = arguments.parse_args()
    params, tokenizer = kvjax.load(given.model)
    prompts = [prompt_of(tokenizer, text) for text in REQUESTS[: given.requests]]
    names = list(dict.fromkeys(policy.format(budget=given.budget) for policy in given.policies))
    # Speeds are compared within a turn only, so that turns of other policies count as another setting.
    setting = {"model": given.model, "tokens": given.tokens, "requests": len(prompts), "policies": names}
    lines = MeasuredLines(given.out / "speed.jsonl", setting, key=("policy", "turn"))
    for turn in range(given.turns):
        if all((name, turn) in lines for name in names):
            continue
        measured = []
        for name in names:
            stats = kvjax.generate(params, prompts, policy=name, max_new_tokens=given.tokens, sampler=SAMPLER).stats
            speed, size = round(stats.decode_tokens_per_second, 2), stats.cache_bytes // len(prompts)
            measured.append({"policy": name, "turn": turn, "tokens_per_second": speed, "cache_bytes": size})
            print(f"turn {turn + 1}, {name}: {speed} tokens per second", flush=True)
        lines.append(measured)
    print(table(lines))


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Each policy beside the first one, over all turns."""
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        found[line["policy"]].append(line)
    speeds = {policy: [line["tokens_per_second"] for line in some] for policy, some in found.items()}
    first = next(iter(speeds.values()))
    rows = ["| policy | tokens/s | ratio | MB per row |", "|---|---:|---:|---:|"]
    for policy, own in speeds.items():
        ratios = [mine / other for mine, other in zip(own, first, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        size = found[policy][0]["cache_bytes"] / 1e6
        rows.append(f"| `{policy}` | {statistics.median(own):.1f} | {spread} | {size:.1f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()

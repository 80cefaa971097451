"""Measures which tokens of a needle policies retain: the share of kv heads that hold each token of the answer.

    python -m benchmarks.measure_retention MODEL DATA
    python -m benchmarks.measure_retention MODEL DATA --policies snapkv:budget=0.25 tova:budget=0.25 --examples 20

MODEL is what `kvjax.load` takes, DATA a folder with the essays of `scripts/fetch_real_model.py`. The prompts are those
of RULER's niah_single_2, question included. Each is compressed up to its last token, as `kvjax eval` does with
`question: before`. The output is a table, averaged over the prompts whose answer has the most frequent length.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

import kvjax
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item, read_items
from kvjax.kv_cache import KVCache

POLICIES = (
    "snapkv:budget=0.25",
    "snapkv:budget=0.25,kernel=15",
    "snapkv:budget=0.25,kernel=31",
    "snapkv:budget=0.25,kernel=63",
    "chunkkv:base=snapkv,base.budget=0.25",
    "h2o:budget=0.25",
    "tova:budget=0.25",
    "morphkv:budget=0.25",
    "streaming_llm:budget=0.25",
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("model")
    arguments.add_argument("data", type=Path)
    arguments.add_argument("--length", type=int, default=1024)
    arguments.add_argument("--examples", type=int, default=12)
    arguments.add_argument("--policies", nargs="+", default=POLICIES)
    given = arguments.parse_args()
    params, tokenizer = kvjax.load(given.model)
    task = {"name": "ruler/niah_single_2", "lengths": [given.length], "limit": given.examples}
    grid = Grid.of({"data": str(given.data), "tasks": [task], "policies": ["full"]})
    prompts, answers = zip(*prompts_of(grid, tokenizer, params.config.max_positions), strict=True)
    size = Counter(map(len, answers)).most_common(1)[0][0]
    chosen = [b for b, answer in enumerate(answers) if len(answer) == size]
    print(f"{len(chosen)} prompts, answers of {size} tokens")
    print("| policy | " + " | ".join(f"token {i + 1}" for i in range(size)) + " | all |\n|---|" + "---:|" * (size + 1))
    for name in given.policies:
        cache = kvjax.prefill(params, list(prompts), policy=name)
        held = [retained(cache, b, answers[b]) for b in chosen]
        shares = [*np.mean([x.mean(axis=0) for x in held], axis=0), np.mean([x.all(axis=1).mean() for x in held])]
        print(f"| `{name}` | " + " | ".join(f"{share:.2f}" for share in shares) + " |", flush=True)


def prompts_of(grid: Grid, tokenizer: Any, max_positions: int) -> list[tuple[list[int], range]]:
    """The ids of each prompt without its last token, and the positions of its answer in the text."""
    found = []
    for item in read_items(grid, tokenizer, max_positions):
        if not isinstance(item, Item):
            raise SystemExit(f"{item.task}: {item.reason}")
        ids = np.concatenate([item.context, item.questions[0]])[:-1].tolist()
        answer = tokenizer(item.example.questions[0].answers[0], add_special_tokens=False)["input_ids"]
        at = next(i for i in range(len(ids)) if ids[i : i + len(answer)] == answer)
        found.append((ids, range(at, at + len(answer))))
    return found


def retained(cache: KVCache, row: int, positions: range) -> Bool[np.ndarray, "heads positions"]:
    """Returns whether each kv head of all layers holds an entry of each position."""
    heads = [head for layer in cache.entries.by_head(row) for head in layer]
    return np.array([np.isin(positions, np.asarray(head)) for head in heads])


if __name__ == "__main__":
    main()

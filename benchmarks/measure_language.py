"""Measures what eviction while decoding costs in language: bits per token of essays that are decoded token by token.

    python -m benchmarks.measure_language MODEL ESSAYS --out runs/language
    python -m benchmarks.measure_language MODEL ESSAYS --out runs/language --tokens 8192 --texts 4 --budgets 512 \
        --policies full streaming_llm:budget={budget} morphkv:budget={budget},window=32

MODEL is what `kvjax.load` takes, ESSAYS a folder of .txt files. Each text is a piece of the essays, cut where its
number of tokens is reached, and no two texts overlap. A text is decoded from its second token on, so that a policy
evicts as it does in an answer. Results are appended to OUT/language.jsonl, one line per policy, budget and text; a
second call computes what is missing. The output is the table of all lines of this model, number of tokens and number
of texts: bits per token by position, and the difference to the full cache with a 95 % interval over texts.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvjax
from benchmarks.measured_lines import MeasuredLines
from kvjax.evaluation import programs
from kvjax.evaluation.continuations import marks
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder

POLICIES = (
    "full",
    "streaming_llm:budget={budget}",
    "random:budget={budget},recent=32,every=1",
    "h2o:budget={budget}",
    "tova:budget={budget}",
    "scissorhands:budget={budget}",
    "keyformer:budget={budget}",
    "keydiff:budget={budget},recent=32,every=1",
    "rkv:budget={budget},every=16",
    "gkv:budget={budget},every=16",
    "vase:budget={budget},window=32,every=16",
    "d2o:budget={budget}",
    "cam:budget={budget}",
    "kvmerger:budget={budget},every=32",
    "morphkv:budget={budget},window=32",
    "morphkv:budget={budget},window=32,every=8",
)
BLOCK = 256  # tokens whose mean is stored
CALL = 128  # tokens per call of the program
DRAWS = 2000


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("model")
    arguments.add_argument("essays", type=Path)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--tokens", type=int, default=2048, help="of each text")
    arguments.add_argument("--texts", type=int, default=8, help="decoded as one batch")
    arguments.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512])
    arguments.add_argument("--policies", nargs="+", default=POLICIES)
    given = arguments.parse_args()
    if given.tokens < 1 or given.tokens % BLOCK:
        raise SystemExit(f"--tokens {given.tokens}: expected a multiple of {BLOCK}")
    params, tokenizer = kvjax.load(given.model)
    texts = cut(given.essays, tokenizer, tokens=given.tokens, texts=given.texts)
    setting = {"model": given.model, "essays": str(given.essays), "tokens": given.tokens, "texts": given.texts}
    lines = MeasuredLines(given.out / "language.jsonl", setting, key=("policy", "text"))
    for name in dict.fromkeys(p.format(budget=b) for p in given.policies for b in given.budgets):
        if all((name, i) in lines for i in range(given.texts)):
            continue
        programs.make_room(name)
        began = time.time()
        bits = surprisals(params, texts, kvjax.policies.parse(name))
        seconds = round(time.time() - began, 1)
        rows = bits.reshape(given.texts, -1, BLOCK).mean(axis=2).tolist()
        lines.append({"policy": name, "text": i, "bits": row, "seconds": seconds} for i, row in enumerate(rows))
        print(f"{name}: {bits.mean():.3f} bits per token, {seconds} s", flush=True)
    print(table(list(lines)))


def cut(folder: Path, tokenizer: Any, *, tokens: int, texts: int) -> Int[np.ndarray, "texts tokens+2"]:
    """Pieces of the essays, in the order of the files' names."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise SystemExit(f"{folder} has no .txt file")
    ids: list[int] = []
    for file in files:
        ids += tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        if len(ids) >= texts * (tokens + 2):
            return np.array(ids[: texts * (tokens + 2)], np.int32).reshape(texts, -1)
    raise SystemExit(f"{folder} has {len(ids)} tokens: expected {texts} texts of {tokens + 2}")


def surprisals(params: Decoder, texts: Int[np.ndarray, "B T+2"], policy: kvjax.Policy) -> Float[np.ndarray, "B T"]:
    """The bits of the last T tokens, each given those before it as the policy retains them."""
    cache = kvjax.prefill(params, texts[:, :1].tolist(), policy=policy)
    cache, bits = kvjax.with_room(cache, texts.shape[1] - 2), []
    for start in range(1, texts.shape[1] - 1, CALL):
        window = texts[:, start : start + CALL + 1]
        cache, some = decode(params, cache, window[:, :-1], window[:, 1:])
        bits.append(some)
    return np.concatenate(bits, axis=1)


@partial(jax.jit, donate_argnames="cache")
def decode(
    params: Decoder, cache: KVCache, tokens: Int[Array, "B N"], targets: Int[Array, "B N"]
) -> tuple[KVCache, Float[Array, "B N"]]:
    """Decodes N tokens of each row. Returns the bits of the targets, each of which follows its token."""

    def step(cache: KVCache, pair: tuple[Array, Array]) -> tuple[KVCache, Array]:
        token, target = pair
        logits, cache = kvjax.extend(params, cache, token[:, None])
        return cache, -marks(logits, target)[0] / jnp.log(2.0)

    cache, bits = jax.lax.scan(step, cache, (tokens.T, targets.T))
    return cache, bits.T


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Bits per token in each quarter of the texts, in whole blocks; the last columns are over all tokens."""
    found: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for line in lines:
        found[line["policy"]][line["text"]] = line["bits"]
    blocks = np.arange(len(lines[0]["bits"]))
    quarters = np.array_split(blocks, min(4, blocks.size))
    names = [f"{part[0] * BLOCK} to {(part[-1] + 1) * BLOCK}" for part in quarters]
    rows = ["| policy | " + " | ".join(names) + " | all | above `full` |", "|---|" + "---:|" * (len(names) + 2)]
    full = found.get("full", {})
    for policy, texts in found.items():
        bits = np.array(list(texts.values()))
        means = [bits[:, part].mean() for part in quarters]
        beside = ""
        # A policy whose lines were incomplete has fewer texts until it is measured again.
        if policy != "full" and (both := sorted(texts.keys() & full.keys())):
            more, spread = interval(np.array([np.mean(texts[i]) - np.mean(full[i]) for i in both]))
            beside = f"{more:+.3f} ±{spread:.3f}"
        cells = " | ".join(f"{x:.3f}" for x in [*means, bits.mean()])
        rows.append(f"| `{policy}` | {cells} | {beside} |")
    return "\n".join(rows)


def interval(x: Float[np.ndarray, "texts"]) -> tuple[float, float]:
    """The mean, and half of the width of its 95 % bootstrap interval over texts."""
    rng = np.random.default_rng(0)
    low, high = np.quantile(x[rng.integers(len(x), size=(DRAWS, len(x)))].mean(axis=1), [0.025, 0.975])
    return float(x.mean()), float(high - low) / 2


if __name__ == "__main__":
    main()

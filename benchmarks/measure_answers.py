"""Measures long answers under policies that evict while decoding, beside those of the full cache.

    python -m benchmarks.measure_answers MODEL --out runs/answers

MODEL is what `kvjax.load` takes; its chat template forms the prompts. Two things are measured, for a batch of requests:

* the policy's own answer: its length, the share of repeated sequences of ten words (MorphKV, Table 5), the tokens per
  second of the batch, and the bytes of the cache;
* agreement: the policy decodes the full cache's answer, and the divergence KL(full || policy) of the two next-token
  distributions is recorded at each token, in bits.

Answers are sampled with a seed. Results are appended to OUT/answers.jsonl, one line per policy, budget and request; a
second call computes what is missing. The output is two tables of all lines of this model, length, seed and number of
requests: one with halves of each answer, and one with the divergence by position.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
from benchmarks.measure_language import interval
from benchmarks.measured_lines import MeasuredLines
from kvjax.evaluation import programs
from kvjax.evaluation.metrics import repetition
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder

REQUESTS = (
    "Write a long story about a lighthouse keeper who finds a letter from her future self.",
    "Explain in detail how bread is made, from the field of wheat to the table.",
    "Write a long travel report of a week on a small island with an old harbour.",
    "Describe the history of the bicycle, and how it changed the life of towns.",
    "Write a long dialogue between a young gardener and a retired engineer about patience.",
    "Explain in detail how a small company can plan its first year.",
    "Write a long letter from a scientist to her brother about a winter in Antarctica.",
    "Describe how a village prepares a festival, from the first meeting to the last song.",
)
POLICIES = (
    "full",
    "streaming_llm:budget={budget}",
    "h2o:budget={budget}",
    "tova:budget={budget}",
    "keyformer:budget={budget}",
    "rkv:budget={budget},every=16",
    "kvmerger:budget={budget},every=32",
    "morphkv:budget={budget},window=32",
)
SAMPLER = kvjax.Sampler(temperature=0.8, top_p=0.95)
BLOCK = 128  # tokens per call, whose mean divergence is stored
SPAN = 2  # blocks of a column of the table by position


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("model")
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--tokens", type=int, default=1024, help="the most of an answer")
    arguments.add_argument("--requests", type=int, default=len(REQUESTS))
    arguments.add_argument("--budgets", type=int, nargs="+", default=[128, 256])
    arguments.add_argument("--policies", nargs="+", default=POLICIES)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    params, tokenizer = kvjax.load(given.model)
    prompts = [prompt_of(tokenizer, text) for text in REQUESTS[: given.requests]]
    setting = {"model": given.model, "tokens": given.tokens, "seed": given.seed, "requests": len(prompts)}
    lines = MeasuredLines(given.out / "answers.jsonl", setting, key=("policy", "request"))
    answer = partial(
        kvjax.generate, params, tokenizer=tokenizer, max_new_tokens=given.tokens, sampler=SAMPLER, seed=given.seed
    )
    answered: kvjax.Generation | None = None
    for name in dict.fromkeys(p.format(budget=b) for p in given.policies for b in given.budgets):
        if all((name, i) in lines for i in range(len(prompts))):
            continue
        programs.make_room(name)
        answered = answered or answer(prompts, policy="full")
        own = answered if name == "full" else answer(prompts, policy=name)
        apart = divergences(params, prompts, answered, kvjax.policies.parse(name))
        lines.append(
            {
                "policy": name,
                "request": i,
                "length": int(own.lengths[i]),
                "repetition": repetition(own.text[i]) if own.text else None,
                "divergence": [None if np.isnan(x) else round(float(x), 5) for x in apart[i]],
                "tokens_per_second": round(own.stats.decode_tokens_per_second, 2),
                "cache_bytes": own.stats.cache_bytes // len(prompts),
            }
            for i in range(len(prompts))
        )
        print(f"{name}: {np.nanmean(apart):.4f} bits apart", flush=True)
    print(f"\n{table(lines)}\n\n{by_position(lines)}")


def prompt_of(tokenizer: Any, text: str) -> list[int]:
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def divergences(
    params: Decoder, prompts: list[list[int]], answered: kvjax.Generation, policy: kvjax.Policy
) -> Float[np.ndarray, "B blocks"]:
    """The mean divergence from the full cache in each block of its answers; NaN after the end of an answer."""
    blocks = -(-answered.tokens.shape[1] // BLOCK)
    tokens = np.full((len(prompts), blocks * BLOCK), -1, np.int32)
    tokens[:, : answered.tokens.shape[1]] = answered.tokens
    caches = [kvjax.prefill(params, prompts, policy=p) for p in (kvjax.policies.full(), policy)]
    caches = [kvjax.with_room(cache, tokens.shape[1]) for cache in caches]
    found = []
    for part in np.split(tokens, blocks, axis=1):
        caches, bits = compare(params, caches, np.maximum(part, 0), part >= 0)
        counts = (part >= 0).sum(axis=1)
        found.append(np.where(counts > 0, np.asarray(bits).sum(axis=1) / np.maximum(counts, 1), np.nan))
    return np.stack(found, axis=1)


@partial(jax.jit, donate_argnames="caches")
def compare(
    params: Decoder, caches: list[KVCache], tokens: Int[Array, "B N"], there: Bool[Array, "B N"]
) -> tuple[list[KVCache], Float[Array, "B N"]]:
    """Decodes N tokens in both caches. Returns KL(first || second) of the next tokens in bits, or 0."""

    def step(caches: list[KVCache], pair: tuple[Array, Array]) -> tuple[list[KVCache], Array]:
        token, lengths = pair
        one, other = (kvjax.extend(params, cache, token[:, None], lengths) for cache in caches)
        p, q = (jax.nn.log_softmax(logits) for logits, _ in (one, other))
        bits = jnp.sum(jnp.exp(p) * (p - q), axis=1) / jnp.log(2.0)
        return [one[1], other[1]], jnp.where(lengths > 0, bits, 0.0)

    caches, bits = jax.lax.scan(step, caches, (tokens.T, there.T.astype(jnp.int32)))
    return caches, bits.T


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        found[line["policy"]].append(line)
    names = ["policy", "KL, first half", "KL, second half", "repetition, %", "tokens", "tokens/s", "MB per row"]
    rows = ["| " + " | ".join(names) + " |", "|---|" + "---:|" * (len(names) - 1)]
    for policy, some in found.items():
        apart = [np.array(line["divergence"], float) for line in some]
        halves = [np.array([np.nanmean(half) for half in pair]) for pair in zip(*map(in_halves, apart), strict=True)]
        repeated = np.array([line["repetition"] for line in some if line["repetition"] is not None])
        cells = ["{:.3f} ±{:.3f}".format(*interval(half)) for half in halves]
        cells.append("{:.1f} ±{:.1f}".format(*interval(100 * repeated)))
        cells.append(f"{np.mean([line['length'] for line in some]):.0f}")
        cells += [f"{some[0]['tokens_per_second']:.1f}", f"{some[0]['cache_bytes'] / 1e6:.1f}"]
        rows.append(f"| `{policy}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def by_position(lines: Iterable[Mapping[str, Any]]) -> str:
    """A table of the divergence in each span of tokens, over the answers that reach it."""
    found: dict[str, list[Any]] = defaultdict(list)
    for line in lines:
        found[line["policy"]].append(line["divergence"])
    each = {policy: np.array(some, float) for policy, some in found.items()}
    starts = range(0, max((apart.shape[1] for apart in each.values()), default=0), SPAN)
    spans = {
        policy: [[np.nanmean(row) for row in apart[:, s : s + SPAN] if not np.isnan(row).all()] for s in starts]
        for policy, apart in each.items()
    }
    reach = [max((len(some[i]) for some in spans.values()), default=0) for i in range(len(starts))]
    names = [f"tokens {s * BLOCK + 1:,} to {(s + SPAN) * BLOCK:,}: {n}" for s, n in zip(starts, reach, strict=True)]
    rows = ["| KL, policy | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for policy, some in spans.items():
        cells = ["{:.3f} ±{:.3f}".format(*interval(np.array(span))) if span else "" for span in some]
        rows.append(f"| `{policy}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def in_halves(apart: Float[np.ndarray, "blocks"]) -> list[Float[np.ndarray, "half"]]:
    return np.array_split(apart[~np.isnan(apart)], 2)


if __name__ == "__main__":
    main()

"""Measures what each method costs on a CPU, while reading a prompt and while decoding.

    python -m benchmarks.bench_methods --case prefill --preset kvmerger h2o > bench_methods.jsonl

Two sides take turns in one process, a method and its reference, after one call each that compiles. The output is JSON
lines: every measurement, then the ratios of the two sides' medians, with a goal where there is one. Elapsed time is
reported beside the CPU time of the process, which is more reliable on a busy machine. The cases:

    prefill     reading a prompt under each preset; reference: reading it with full attention
    replay      the same for methods that score by a second pass; reference: reading the prompt, and then once more
                behind itself
    crush       the same for `kvcrush`; reference: its base, SnapKV
    decode      a decode step under each preset; reference: the same number of slots without a policy
    budgets     a decode step on pools of segments with budgets of a quarter, a sixteenth and a sixty-fourth of the
                prompt, equal over heads and not, and on SnapKV's layers of slots; reference: a full cache
    clustering  KVMerger's sets with `merge.theta=None`; reference: the scores of all queries on the same keys; and with
                four times the keys; reference: the sets of the first

A preset with a budget retains a quarter of the prompt (`prefill`), or 512 entries of 1,024 (`decode`). A preset that
needs another policy has SnapKV. The model is that of `bench_cpu.py` with two layers, with random weights, gates
and statistics in float32.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

CASES = ("prefill", "replay", "crush", "decode", "budgets", "clustering")
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 8, 2, 64
SLOTS = 512
UNINSTRUCTED = "score.instruction='',score.starting='',score.suffix=''"  # there is no tokenizer
OF_A_MODEL = ("duo_attention", "headkv", "lukv", "per_layer")  # their numbers are for other layers and heads
VARIANTS = {
    "d2o": ("layer_budgets=False", "dense_first=0,dense_last=0"),
    "kvmerger": ("", "merge.theta=None"),
    "morphkv": ("", "every=8"),
    "simlayerkv": ("recent=256",),
    "kvzip": (UNINSTRUCTED,),
    "kvgrad": (UNINSTRUCTED,),
}
# Prefill over full attention, at most.
GOALS = {
    **dict.fromkeys(("snapkv", "pyramidkv", "morphkv", "tova"), 1.03),
    **dict.fromkeys(("kvzap", "fastkvzip"), 1.05),
    **dict.fromkeys(("h2o", "kvmerger", "cam", "d2o"), 1.2),
    "keyformer": 2.0,
}

Run = Callable[[], Any]


def texts(name: str, budget: int) -> Iterator[str]:
    """A preset with a budget as text, and variants of it."""
    from kvjax.policies import PRESETS
    from kvjax.policy import Policy

    options = []
    parameters = inspect.signature(PRESETS[name]).parameters
    for option, parameter in parameters.items():
        if option == "budget":
            options.append(f"budget={budget}")
        elif option == "recent" and "gates" in parameters:
            options.append(f"recent={budget - parameters['sinks'].default}")
        elif isinstance(parameter.default, Policy):
            base = "h2o" if "every" in parameters else "snapkv"  # a wrapper of policies that evict while decoding
            options += [f"{option}={base}", f"{option}.budget={budget}"]
    for variant in VARIANTS.get(name, ("",)):
        yield f"{name}:{','.join(filter(None, (*options, variant)))}".rstrip(":")


def compare(sides: dict[str, Run], repeats: int, facts: dict[str, Any]) -> None:
    """Prints `repeats` measurements of each side in turns, and the ratio of each one's median to the first one's."""
    for run in sides.values():
        run()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            start = time.perf_counter(), time.process_time()
            run()
            taken[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
            seconds, cpu_seconds = taken[name][-1]
            print(json.dumps({"side": name, **facts, "seconds": seconds, "cpu_seconds": cpu_seconds}), flush=True)
    reference = next(iter(sides))
    for i, clock in enumerate(("seconds", "cpu_seconds")):
        medians = {name: statistics.median(pair[i] for pair in pairs) for name, pairs in taken.items()}
        ratios = {name: median / medians[reference] for name, median in medians.items() if name != reference}
        print(json.dumps({**facts, "median": clock, "of": medians, "over": reference, "ratio": ratios}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--preset", nargs="+", metavar="PRESET", help="of the cases prefill and decode; all by default")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens in a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to decode, at most 128")
    parser.add_argument("--repeats", type=int, default=3, help="measurements beyond the first, which compiles")
    parser.add_argument("--threads", type=int, default=2, help="cores to be confined to")
    arguments = parser.parse_args()
    if not 1 < arguments.new <= 128:
        parser.error("--new must be 2 .. 128: the reference's 512 slots have room for so many")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])  # before XLA counts them

    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    import kvjax
    from kvjax.gates.adapters import adapter_sizes
    from kvjax.gates.files import Gates
    from kvjax.gates.reconstruction import random_weights
    from kvjax.methods.kvmerger.cluster import set_ends, solve_theta
    from kvjax.models import Decoder, DecoderConfig, Rope
    from kvjax.pallas_kernels import Reduction, window_scores
    from kvjax.policies import PRESETS, parse
    from kvjax.statistics.forms import STATISTICS

    # DuoAttention's gates and HeadKV's importance are a model's own, and of another one.
    presets = arguments.preset or [name for name in PRESETS if name not in ("full", *OF_A_MODEL)]
    if unknown := set(presets) - set(PRESETS):
        parser.error(f"unknown presets {sorted(unknown)}: expected {', '.join(PRESETS)}")
    rng = np.random.default_rng(0)
    windows, rope = (None,) * LAYERS, Rope(10_000.0)
    config = DecoderConfig("llama", 32_000, 512, 1536, HEADS, KV_HEADS, HEAD_DIM, windows, rope, 32_768)
    shapes = {name: shape(config) for name, shape in STATISTICS.items()}
    statistics = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    params = kvjax.with_statistics(Decoder(config, nnx.Rngs(0), jnp.float32), statistics)
    of_heads = {"input_dim": config.hidden_size, "output_dim": KV_HEADS, "hidden_dim": config.hidden_size // 8}
    of_keys = {"input_dim": config.hidden_size, "nhead": KV_HEADS, "ngroup": HEADS // KV_HEADS}
    of_keys |= {"output_dim": 16, "sink": 16}
    learned = {**adapter_sizes(config), "rank": 8, "tokens": 32}
    of_methods: dict[str, Mapping[str, int | None]] = {"kvzap": of_heads, "fastkvzip": of_keys}
    of_methods |= {"lookaheadkv": learned, "restorekv": learned}
    for method, sizes in of_methods.items():
        drawn = jax.tree.map(np.asarray, random_weights(method, sizes, LAYERS, seed=0))
        params = kvjax.with_gates(params, Gates(method, sizes, drawn))
    prompt = rng.integers(0, config.vocab_size, (1, arguments.prompt)).astype(np.int32)

    def reads(text: str) -> Run:
        return lambda: jax.block_until_ready(kvjax.prefill(params, prompt, policy=parse(text)))

    def decodes(text: str, length: int) -> Run:
        document = kvjax.prefill(params, prompt[:, :length], policy=parse(text))
        question = prompt[:, :1]
        return lambda: kvjax.generate(params, question, cache=document, max_new_tokens=arguments.new)

    budget = arguments.prompt // 4
    if "prefill" in arguments.case:
        for name in presets:
            for text in texts(name, budget):
                facts = {"case": "prefill", "prompt": arguments.prompt, "goal": GOALS.get(name)}
                compare({"full": reads("full"), text: reads(text)}, arguments.repeats, facts)
    if "replay" in arguments.case:

        def twice() -> Any:
            document = kvjax.prefill(params, prompt, policy=parse("full"))
            return jax.block_until_ready(kvjax.prefill(params, prompt, cache=document))

        sides = {"twice": twice} | {
            text: reads(text) for name in ("kvcompose", "kvzip") for text in texts(name, budget)
        }
        compare(sides, arguments.repeats, {"case": "replay", "prompt": arguments.prompt, "goal": 1.0})
    if "crush" in arguments.case:
        base = f"snapkv:budget={budget}"
        for granularity in ("token", "chunk", "page"):
            text = f"kvcrush:base=snapkv,base.budget={budget},granularity={granularity}"
            facts = {"case": "crush", "prompt": arguments.prompt, "goal": 1.01}
            compare({base: reads(base), text: reads(text)}, arguments.repeats, facts)
    if "decode" in arguments.case:
        for name in presets:
            for text in texts(name, SLOTS):
                limited = "budget" in text
                grows = parse(text).every is None  # then the answer comes on top, here as in the reference
                length = SLOTS if grows else SLOTS // 2  # which is given 512 slots to go on in
                sides = {"slots": decodes("full", length), text: decodes(text, 2 * SLOTS if limited else length)}
                slots = [list(run().cache.entries.bounds) for run in sides.values()]
                compare(sides, arguments.repeats, {"case": "decode", "tokens": arguments.new, "slots": slots})
    if "budgets" in arguments.case:
        sides = {"full": decodes("full", arguments.prompt)}
        for share in (4, 16, 64):
            budget = arguments.prompt // share
            for text in ("snapkv:", "kvcompose:score.source=self,", "kvcompose:score.source=self,structured=False,"):
                sides[f"{text}budget={budget}"] = decodes(f"{text}budget={budget}", arguments.prompt)
        compare(sides, arguments.repeats, {"case": "budgets", "prompt": arguments.prompt, "tokens": arguments.new})
    if "clustering" in arguments.case:

        @jax.jit
        def cluster(keys: Any) -> Any:
            count = jnp.full(keys.shape[:2], keys.shape[2])
            sections = jnp.zeros(keys.shape[:3], jnp.int32)
            theta = solve_theta(keys, sections, count, count // 4, "anchor")
            return set_ends(keys, sections, count, theta, "anchor")

        @jax.jit
        def score(q: Any, k: Any) -> Any:
            at = jnp.arange(k.shape[2])[None]
            lse, reduction = jnp.full(q.shape[:3], 20.0), Reduction("sum", "mean", "group")
            held = jnp.broadcast_to(at[:, None], k.shape[:3])
            return window_scores(q, k, at, held, scale=HEAD_DIM**-0.5, lse=lse, reduction=reduction)

        def draw(heads: int, tokens: int) -> Any:
            x = rng.normal(size=(1, heads, tokens, HEAD_DIM)).astype(np.float32)
            return jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))

        size = arguments.prompt
        q, few, many = draw(HEADS, size), draw(KV_HEADS, size), draw(KV_HEADS, 4 * size)
        runs = {
            "clusters": lambda: jax.block_until_ready(cluster(few)),
            "scores": lambda: jax.block_until_ready(score(q, few)),
            "clusters of 4x": lambda: jax.block_until_ready(cluster(many)),
        }
        facts = {"case": "clustering", "tokens": size, "goal": "scores >= 1, clusters of 4x <= 5"}
        compare(runs, arguments.repeats, facts)


if __name__ == "__main__":
    main()

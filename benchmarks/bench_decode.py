"""Measures what policies cost and save end to end, on a decoder of Llama-3.1-8B's shape with random weights.

    python -m benchmarks.bench_decode > bench_decode.jsonl            # on a GPU or TPU, in bfloat16
    python -m benchmarks.bench_decode --small                         # anywhere, as a check that it runs

Two sides of a comparison take turns in one process, after one call each that compiles. The output is JSON lines: every
measurement, then the ratio of the medians and its goal. The cases, each divided by its reference:

    kernels     the kernels of a step, by their launches and time; GPUs only
    roofline    a step of one row on 2,048 slots; reference: one read of all weights and entries at the rate of a copy
    morphkv     a step that evicts, with windows of 32 and 200 and at every 8th step; reference: the same 2,048 slots
    dynamickv   tokens/s after a long prompt with 128 entries per layer, and time to the first; reference: full cache
    batch       tokens/s of all rows of MorphKV (600 entries); reference: SnapKV (1,024), each with the rows that fit
    flat        a step after an answer of 8,192 tokens under MorphKV; reference: a step after the prompt
    kvcrush     reading a prompt; reference: its base, SnapKV
    prompt      reading a prompt at once or in chunks, with all kernels or without cuDNN; reference: at once, with all
    prefill     the peak memory that reading a long prompt takes, beyond weights and the retained cache
    answer      129 tokens after 4,096: the first answer, which compiles unless a cache has its programs, and later ones
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks.aot.lower import plan_params
from benchmarks.device_time import Kernel, has_cupti, kernels
from kvjax import pallas_kernels
from kvjax.decoding.loop import Decoding, decode
from kvjax.engine.memory import Footprint, bytes_of
from kvjax.models import Decoder, DecoderConfig, Rope
from kvjax.policies import parse
from kvjax.request.request import AnswerOptions, Request, read_request
from kvjax.runtime.gpu_flags import STEP_OPTIONS, set_gpu_flags

LLAMA_8B = DecoderConfig("llama", 128_256, 4096, 14_336, 32, 8, 128, (None,) * 32, Rope(500_000.0), 131_072)
SMALL = DecoderConfig("llama", 1000, 64, 128, 4, 2, 16, (None,) * 2, Rope(500_000.0), 131_072)

Run = Callable[[], float]


def compare(case: str, sides: dict[str, Run], repeats: int, goal: str, **facts: Any) -> None:
    """Measures the sides in turns, and prints the ratio of each one's median to the first one's."""
    for run in sides.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            taken[name].append(run())
            show(case=case, side=name, measured=taken[name][-1], **facts)
    medians = {name: statistics.median(values) for name, values in taken.items()}
    first = next(iter(sides))
    ratios = {name: value / medians[first] for name, value in medians.items() if name != first}
    show(case=case, medians=medians, over=first, ratio=ratios, goal=goal, **facts)


def show(**line: Any) -> None:
    print(json.dumps(line), flush=True)


@dataclass(frozen=True)
class Bench:
    """The model, its sizes and how often things are measured."""

    small: bool
    repeats: int
    layers: int | None
    given: int | None = None

    @cached_property
    def config(self) -> DecoderConfig:
        config = SMALL if self.small else LLAMA_8B
        return config if self.layers is None else replace(config, windows=config.windows[: self.layers])

    @cached_property
    def params(self) -> Decoder:
        """Drawn on the device, by one program per shape."""
        dtype = jnp.float32 if self.small else jnp.bfloat16
        draw = jax.jit(
            lambda key, shape: (jax.random.normal(key, shape) * self.config.hidden_size**-0.5).astype(dtype),
            static_argnums=1,
        )
        shapes, tree = jax.tree.flatten(plan_params(self.config, dtype, kvjax.make_mesh(devices=jax.devices()[:1])))
        keys = jax.random.split(jax.random.key(0), len(shapes))
        leaves = [
            jnp.ones(x.shape, dtype) if len(x.shape) == 1 else draw(key, x.shape)
            for key, x in zip(keys, shapes, strict=True)
        ]
        return jax.tree.unflatten(tree, leaves)

    @property
    def memory(self) -> int:
        """Bytes that are given, or bytes of the device that JAX may take."""
        return self.given or (jax.devices()[0].memory_stats() or {"bytes_limit": 16 << 20})["bytes_limit"]

    def size(self, tokens: int) -> int:
        """So many tokens, or a sixteenth where all is small."""
        return tokens // 16 if self.small else tokens

    def prompt(self, batch: int, tokens: int) -> np.ndarray:
        return np.random.default_rng(0).integers(0, self.config.vocab_size, (batch, tokens)).astype(np.int32)

    def document(self, text: str, batch: int, tokens: int) -> kvjax.KVCache:
        chunk = 4096 if tokens > 4096 else None
        return kvjax.prefill(self.params, self.prompt(batch, tokens), policy=parse(text), chunk=chunk)

    def step(self, text: str, batch: int, tokens: int, new: int) -> Run:
        """Seconds a step of `new` ones after a prompt of `tokens`."""
        document = self.document(text, batch, tokens)
        question = self.prompt(batch, 1)

        def run() -> float:
            out = kvjax.generate(self.params, question, cache=document, max_new_tokens=new, eos=())
            return out.stats.decode_seconds / (new - 1)

        return run

    def kernels(self) -> None:
        """The difference of two loops is what one step launches, without what comes before and after."""
        if not has_cupti():
            show(case="kernels", skipped="no GPU of NVIDIA is here")
            return
        slots, new = self.size(2048), 8
        loop = jax.jit(inspect.unwrap(decode), compiler_options=STEP_OPTIONS)  # donates nothing, so it can run twice
        for batch, text in itertools.product(
            (1, 8), ("full", f"snapkv:budget={slots}", f"morphkv:budget={slots},window={self.size(32)}")
        ):
            length = slots if text != "full" else slots - 2 * new
            answer = AnswerOptions(2 * new, None, 0, ())
            request = Request.of(self.params, self.prompt(batch, length), policy=text, answer=answer)
            logits, cache = read_request(self.params, request)
            state = Decoding.begin(request.sampling, cache, size=request.room, log_probs=False)
            short, long = (
                {kernel.name: kernel for kernel in kernels(loop, self.params, state, logits, np.int32(limit))}
                for limit in (new, 2 * new)
            )
            zero = Kernel("", 0, 0.0)
            counts = {name: (kernel.launches - short.get(name, zero).launches) / new for name, kernel in long.items()}
            micros = {
                name: 1e6 * (kernel.seconds - short.get(name, zero).seconds) / new for name, kernel in long.items()
            }
            if not counts:
                raise RuntimeError("CUPTI saw no kernel: is another profiler attached?")
            total = {"launches": sum(counts.values()), "microseconds": sum(micros.values())}
            slowest = [
                (name, counts[name], round(micros[name], 1)) for name in sorted(micros, key=lambda n: -micros[n])
            ]
            show(case="kernels", policy=text, batch=batch, **total, slowest=slowest[:30])

    def roofline(self) -> None:
        slots, new = self.size(2048), self.size(128)
        size = 1 << (22 if self.small else 29)
        array = jnp.zeros(size, jnp.bfloat16)
        add = jax.jit(lambda x: x + 1)

        def copy() -> float:
            started = time.perf_counter()
            jax.block_until_ready([add(array) for _ in range(10)])
            return (time.perf_counter() - started) / 10

        copy()
        bandwidth = 2 * array.nbytes / statistics.median(copy() for _ in range(self.repeats))
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params)) - self.params.embed.nbytes
        entries = slots * self.config.bytes_per_token(array.dtype if not self.small else jnp.float32)
        floor = (weights + entries) / bandwidth
        step = self.step("full", 1, slots - new, new)
        step()
        taken = statistics.median(step() for _ in range(self.repeats))
        show(case="roofline", bandwidth=bandwidth, floor=floor, step=taken, reached=floor / taken, goal=">= 0.80")

    def morphkv(self) -> None:
        slots, new = self.size(2048), self.size(128)
        windows = [self.size(32), self.size(200)]
        texts = [f"morphkv:budget={slots},window={window}" for window in windows]
        texts.append(f"morphkv:budget={slots},window={windows[0]},every=8")
        for batch in (1, 8):
            sides = {"slots": self.step("full", batch, slots - new, new)}
            sides |= {text: self.step(text, batch, 2 * slots, new) for text in texts}
            compare("morphkv", sides, self.repeats, "<= 1.03, 1.10, 1.01", batch=batch)

    def dynamickv(self) -> None:
        tokens, new = self.size(32_768), self.size(512)
        # The full cache takes 4.3 GB per row, and as much again if it grows.
        batch = 2 if self.small else 8 if self.memory > 120e9 else 4
        texts = ("full", f"dynamickv:budget={self.size(128)},window={self.size(32)}")
        prompt, firsts, rates = self.prompt(batch, tokens), {}, {}
        for text in texts:  # not both in memory at once
            outs = [self._answer(prompt, text, new) for _ in range(2)]
            firsts[text], rates[text] = outs[-1].prefill_seconds, outs[-1].decode_tokens_per_second
            show(case="dynamickv", side=text, first_token=firsts[text], tokens_per_second=rates[text], batch=batch)
        first, rate = (x[texts[1]] / x[texts[0]] for x in (firsts, rates))
        show(case="dynamickv", first_token=first, tokens_per_second=rate, goal="first token <= 1.01, tokens/s >= 2.3")

    def _answer(self, prompt: np.ndarray, text: str, new: int) -> kvjax.Stats:
        options = {"max_new_tokens": new, "eos": (), "chunk": min(prompt.shape[1], 4096)}
        return kvjax.generate(self.params, prompt, policy=parse(text), **options).stats

    def batch(self) -> None:
        tokens, new, rates = self.size(1024), self.size(256), dict[str, float]()
        texts = (
            f"snapkv:budget={tokens},window={self.size(64)}",
            f"morphkv:budget={self.size(600)},window={self.size(32)}",
        )
        for text in texts:
            footprint = self._footprint(text, tokens, new)
            rows = footprint.rows_within(self.memory)
            rates[text] = rows * (new - 1) / min(self._decoding(text, rows, tokens, new) for _ in range(2))
            planned = {"rows": rows, "row_bytes": footprint.row, "bytes": footprint.total(rows)}
            show(case="batch", side=text, **planned, tokens_per_second=rates[text])
        show(case="batch", ratio=rates[texts[1]] / rates[texts[0]], goal=">= 4.7")

    def _footprint(self, text: str, tokens: int, new: int) -> Footprint:
        """The bytes of a batch of rows, of which one is read and repeated. The sampler holds logits four times."""
        sizes = {"batch": 1, "length": tokens, "new_tokens": new, "dtype": self.params.embed.dtype}
        row, full = (kvjax.plan_cache(self.config, parse(name), **sizes).nbytes for name in (text, "full"))
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        return Footprint(weights, row + 4 * 4 * self.config.vocab_size, prompt=row + full, workspace=self.memory // 16)

    def _decoding(self, text: str, rows: int, tokens: int, new: int) -> float:
        """Seconds of the steps of `rows` answers to one prompt. Reading so many prompts at once takes more memory."""
        rest: dict[str, Any] = {"policy": text, "answer": AnswerOptions(new, None, 0, ())}
        one, all_of = (Request.of(self.params, self.prompt(n, tokens), **rest) for n in (1, rows))
        logits, cache = read_request(self.params, one)
        state = Decoding.begin(all_of.sampling, cache.repeated(rows), size=one.room, log_probs=False)
        inputs = jax.block_until_ready((state, jnp.repeat(logits, rows, axis=0)))
        started = time.perf_counter()
        jax.block_until_ready(decode(self.params, *inputs, np.int32(new)))
        return time.perf_counter() - started

    def flat(self) -> None:
        text, new = f"morphkv:budget={self.size(2048)},window={self.size(32)}", self.size(256)
        cache = self.document(text, 1, self.size(2048))
        answered, steps = self.size(8192), []
        longer = kvjax.generate(self.params, self.prompt(1, 1), cache=cache, max_new_tokens=answered, eos=()).cache
        for document in (cache, longer):
            taken = []
            for _ in range(self.repeats + 1):  # the first compiles
                out = kvjax.generate(self.params, self.prompt(1, 1), cache=document, max_new_tokens=new, eos=())
                taken.append(out.stats.decode_seconds / (new - 1))
            steps.append(statistics.median(taken[1:]))
        show(case="flat", tokens=[0, answered], steps=steps, ratio=steps[1] / steps[0], goal="1 as the answer grows")

    def kvcrush(self) -> None:
        tokens, budget = self.size(8192), self.size(1024)
        base = f"budget={budget},base.window={self.size(64)}"

        def read(text: str) -> Run:
            def run() -> float:
                started = time.perf_counter()
                jax.block_until_ready(self.document(text, 1, tokens))
                return time.perf_counter() - started

            return run

        texts = (f"snapkv:{base.replace('base.', '')}", f"kvcrush:base=snapkv,base.{base}")
        compare("kvcrush", {text: read(text) for text in texts}, self.repeats, "<= 1.002", tokens=tokens)

    def prompt_reading(self) -> None:
        policy = parse(f"snapkv:budget={self.size(2048)},window={self.size(64)}")
        chosen = "xla" if self.small else "triton"

        def reads(tokens: int, chunk: int | None, choice: str) -> Run:
            def run() -> float:
                started = time.perf_counter()
                with pallas_kernels.use(choice):
                    jax.block_until_ready(
                        kvjax.prefill(self.params, self.prompt(1, tokens), policy=policy, chunk=chunk)
                    )
                return time.perf_counter() - started

            return run

        for tokens in map(self.size, (4096, 32_768, 131_072)):
            ways = itertools.product(
                (None, self.size(4096)) if tokens > self.size(4096) else (None,), ("default", chosen)
            )
            sides = {f"chunk={chunk}, {choice}": reads(tokens, chunk, choice) for chunk, choice in ways}
            compare("prompt", sides, self.repeats, "without cuDNN >= 1", tokens=tokens)

    def prefill(self) -> None:
        tokens, device = self.size(131_072), jax.devices()[0]
        jax.block_until_ready(self.params)
        before = (device.memory_stats() or {}).get("bytes_in_use")
        policy = parse(f"snapkv:budget={self.size(2048)},window={self.size(64)}")
        layer = self.config.bytes_per_token(self.params.embed.dtype) // self.config.num_layers * tokens
        for chunk in (self.size(4096), None):  # a device does not forget its peak, so the smaller one comes first
            kept = kvjax.prefill(self.params, self.prompt(1, tokens), policy=policy, chunk=chunk).nbytes
            peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
            beyond = None if peak is None or before is None else peak - before - kept
            facts = {"tokens": tokens, "chunk": chunk, "kept": kept, "layer": layer}
            layers = None if beyond is None else beyond / layer
            show(case="prefill", beyond=beyond, layers=layers, goal="two layers and a chunk", **facts)

    def answer(self) -> None:
        prompt, new = self.prompt(1, self.size(4096)), 129
        for text in ("full", f"morphkv:budget={self.size(1024)},window={self.size(32)}"):
            taken = []
            for _ in range(self.repeats + 1):
                started = time.perf_counter()
                stats = self._answer(prompt, text, new)
                taken.append((time.perf_counter() - started, stats.prefill_seconds, stats.decode_seconds / (new - 1)))
            later, reading, step = map(statistics.median, zip(*taken[1:], strict=True))
            show(case="answer", side=text, first=taken[0][0], later=later, prompt=reading, step=step)


CASES = {  # the peak of memory comes first
    "prefill": Bench.prefill,
    "kernels": Bench.kernels,
    "roofline": Bench.roofline,
    "morphkv": Bench.morphkv,
    "prompt": Bench.prompt_reading,
    "kvcrush": Bench.kvcrush,
    "dynamickv": Bench.dynamickv,
    "batch": Bench.batch,
    "flat": Bench.flat,
    "answer": Bench.answer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--small", action="store_true", help="a small model and a sixteenth of all sizes, in float32")
    parser.add_argument("--layers", type=int, help="all of the model's by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", type=bytes_of, help="such as 16MB; by default what the device has for JAX")
    given = parser.parse_args()
    set_gpu_flags()
    bench = Bench(given.small, given.repeats, given.layers, given.memory)
    show(device=jax.devices()[0].device_kind, jax=jax.__version__, small=given.small, layers=bench.config.num_layers)
    for case, measure in CASES.items():
        if case in given.case:
            measure(bench)


if __name__ == "__main__":
    main()

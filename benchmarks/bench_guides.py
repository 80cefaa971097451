"""Measures the time of a decode step of an engine while none, one or all of its rows have a grammar.

    python -m benchmarks.bench_guides --out runs/guides.jsonl
    python -m benchmarks.bench_guides --out /tmp/try.jsonl --rehearsal      # to see that everything runs

The model is that of `bench_cpu.py`, which has 57 million random parameters, with a vocabulary of 32,000 random words.
All rows decode --new tokens after a prompt of one token. Each measurement is a line of --out: the milliseconds between
one token and the next of the last row, which has a grammar in the side `all` alone.

| side | the engine | rows with a grammar |
|---|---|---|
| plain | has no guides | none |
| none | has guides | none |
| one | has guides | the first |
| all | has guides | all |

The sides take turns, --turns times, with engines of one step per program and of --steps. At the end the script prints
the median of each side, and the median over the turns of its ratio to `plain` of the same number of steps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvjax
from benchmarks.bench_cpu import CPU, SMALL, make_model
from kvjax.engine import Grammar, Guide
from kvjax.runtime.gpu_flags import set_gpu_flags

SIDES = ("plain", "none", "one", "all")
WORDS = Guide(Grammar.regex("[a-z]*"))


def vocabulary(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with an end token, the bytes, and random words."""
    rng, letters = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(["</s>", *letters])
    while len(words) < size:
        words["".join(rng.choices(string.ascii_lowercase, k=rng.randrange(2, 9)))] = None
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def milliseconds(engine: kvjax.Engine, side: str, new: int) -> float:
    """The mean time between tokens of the last row while all rows decode."""
    guided = {"plain": 0, "none": 0, "one": 1, "all": engine.sizes.rows}[side]
    handles = [
        engine.submit([1 + row], max_new_tokens=new, eos=(), guide=WORDS if row < guided else None)
        for row in range(engine.sizes.rows)
    ]
    times = [time.perf_counter() for _ in handles[-1].tokens()]
    for handle in handles:
        assert len(handle.result().tokens) == new
    half = len(times) // 2  # by then all rows have been admitted
    return 1000 * (times[-1] - times[half]) / (len(times) - 1 - half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rehearsal", action="store_true", help="a small model, and one turn")
    given = parser.parse_args()
    if given.rehearsal:
        given.rows, given.new, given.turns = 2, 16, 1
    set_gpu_flags()
    machine = SMALL if given.rehearsal else CPU
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, given.out.open("a") as out:
        make_model(Path(folder), machine, 1, 1)
        params, _ = kvjax.load(folder)
        sizes = {"rows": given.rows, "max_prompt": 16, "max_new_tokens": given.new}
        tokenizer = vocabulary(machine.sizes["vocab_size"])
        engines = {
            (steps, guided): stack.enter_context(
                kvjax.Engine(params, "full", **sizes, tokenizer=tokenizer, steps_at_once=steps, guided=guided)
            )
            for steps in (1, given.steps)
            for guided in (False, True)
        }
        found: dict[tuple[int, str], list[float]] = {}
        for turn in range(-1, given.turns):  # the first one is not counted
            for steps in (1, given.steps):
                for side in SIDES if turn % 2 else SIDES[::-1]:
                    took = milliseconds(engines[steps, side != "plain"], side, given.new)
                    if turn >= 0:
                        found.setdefault((steps, side), []).append(took)
                        line = {"steps": steps, "side": side, "turn": turn, "milliseconds": took}
                        out.write(json.dumps(line) + "\n")
                        out.flush()
    for (steps, side), times in found.items():
        ratios = [time / plain for time, plain in zip(times, found[steps, "plain"], strict=True)]
        print(f"{steps:3} steps  {side:6} {statistics.median(times):8.2f} ms  x {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()

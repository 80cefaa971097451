"""Searches for the composition of parts that predicts answers best from a cache of a given size.

    python -m scripts.search_policy MODEL DATA --use seen --out runs/search
    python -m scripts.search_policy MODEL DATA --use answers --budget 256 --out runs/search
    python -m scripts.search_policy MODEL DATA --use seen --out runs/search --compare full snapkv:budget=0.1

MODEL is what `kvjax.load` takes, or "demo"; DATA is the folder with PaulGrahamEssays, which the demo model needs for
`answers` only.
The uses:

    seen        a prompt that ends with its question is compressed at once
    unknown     a document is compressed, and a question about it follows
    answers     essays are decoded token by token in a cache of a constant number of entries
    dialogue    a document is decoded in such a cache, and a question about it follows

Every policy is measured by the bits that it needs for tokens that are known: the answer of a question, or the essay.
The search starts from a preset. It tries the choices of one part after the other, takes the best one if it is better by
more than the interval of the difference, and ends when a round over all parts changes nothing. It sees half of the
tasks and texts. The result is then compared on the other half with every published preset of the same size. Intervals
are those of paired differences, at 95 %, by bootstrap.

Results are appended to OUT/USE.jsonl, one line per policy and sample; a second call computes what is missing. Another
--seed draws other prompts, or takes the essays that follow those of the seeds below it, to confirm a result.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvjax
from benchmarks.measure_language import cut, interval
from benchmarks.measured_lines import MeasuredLines
from kvjax.evaluation import programs
from kvjax.evaluation.batches import readings
from kvjax.evaluation.continuations import marks
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Ids, Item, read_items
from kvjax.evaluation.model import load_model
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from scripts.fetch_real_model import ESSAYS
from scripts.search_space import Space, of_answers, of_prompts

NEEDLES = {  # RULER's tasks with one answer, so that its tokens are known
    "search": ("ruler/niah_single_2", "ruler/niah_multikey_1"),
    "confirm": ("ruler/niah_single_1", "ruler/niah_single_3"),
}
WORDS = {"search": ("demo/needle", "demo/variables", "demo/frequent"), "confirm": ("demo/keys", "demo/labels")}
START = 64  # tokens of a text that are read before it is decoded token by token
CALL = 64  # steps of a program
TOGETHER = 12  # policies that share a reading, whose caches are held at once


@dataclass(frozen=True)
class Sample:
    """A prompt, and the tokens that follow it.

    Attributes:
        name: the name of the sample.
        prompt: the tokens that are read and compressed together.
        turn: the tokens that are read next, at once; not compressed under a policy that compresses prompts only.
        steps: the tokens that are decoded one by one after them.
        counted: how many of the last steps the policy is measured by.
    """

    name: str
    prompt: Ids
    turn: Ids
    steps: Ids
    counted: int


class Measured:
    """The bits per counted token of every policy and sample, kept in a file."""

    def __init__(self, params: Decoder, tokenizer: Any, lines: MeasuredLines):
        self._params, self._tokenizer, self._lines = params, tokenizer, lines

    def __call__(self, policies: Sequence[kvjax.Policy], samples: Sequence[Sample]) -> Float[np.ndarray, "P N 2"]:
        """Bits per counted token, and 1 where greedy decoding writes all of them."""
        missing = [p for p in policies if any((repr(p), sample.name) not in self._lines for sample in samples)]
        alike: dict[object, list[kvjax.Policy]] = defaultdict(list)
        for policy in missing:
            alike[policy.storage, policy.positions].append(policy)
        shared = [group[i : i + TOGETHER] for group in alike.values() for i in range(0, len(group), TOGETHER)]
        for together in shared:
            for policy, bits, greedy in measure(self._params, self._tokenizer, samples, together):
                self._lines.append(
                    {"policy": repr(policy), "sample": sample.name, "bits": b, "greedy": g}
                    for sample, b, g in zip(samples, bits.tolist(), greedy.tolist(), strict=True)
                )
        found = [[self._lines[repr(p), sample.name] for sample in samples] for p in policies]
        return np.array([[(line["bits"], line["greedy"]) for line in lines] for lines in found])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("model")
    arguments.add_argument("data", nargs="?")
    arguments.add_argument("--use", choices=("seen", "unknown", "answers", "dialogue"), required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--budget", type=float, default=0.1, help="a share of the prompt, or a number of entries")
    arguments.add_argument("--length", type=int, default=1024, help="tokens of a prompt or text")
    arguments.add_argument("--samples", type=int, default=12, help="of each task, or texts")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--compare", nargs="+", metavar="POLICY", help="only compare these with the first of them")
    arguments.add_argument("--seed", type=int, default=0, help="of the prompts, or which essays are cut")
    given = arguments.parse_args()
    constant = given.use in ("answers", "dialogue")
    budget = int(given.budget) if given.budget > 1 else given.budget
    if given.data is None and (given.model != "demo" or given.use == "answers"):
        raise SystemExit(f"DATA is missing: expected the folder with {ESSAYS}")
    if constant and isinstance(budget, float) and not given.compare:
        raise SystemExit(f"--budget {budget}: expected a number of entries for {given.use}")
    if given.seed < 0:
        raise SystemExit(f"--seed {given.seed}: expected an integer >= 0")
    try:
        policies = {text: kvjax.policies.parse(text) for text in given.compare or ()}
    except ValueError as error:
        raise SystemExit(f"--compare: {error}") from None
    space = None if policies else space_of(budget, constant, instructed=given.model != "demo")
    asked = {"model": given.model, "data": given.data, "seed": given.seed}
    grid = Grid.of({**asked, "policies": ["full"], "tasks": ["demo/needle"]})
    params, tokenizer = load_model(grid)
    setting = {"model": given.model, "data": given.data}
    lines = MeasuredLines(given.out / f"{given.use}.jsonl", setting, key=("policy", "sample"))
    measured = Measured(params, tokenizer, lines)
    samples = partial(samples_of, grid, tokenizer, given.use, given.length, given.samples)
    if space is None:
        for half in ("search", "confirm"):
            print(f"\n{half}\n\n{compared(policies, measured, samples(half))}", flush=True)
        return
    best = climbed(space, partial(measured, samples=samples("search")), given.rounds)
    presets = {text: kvjax.policies.parse(text) for text in space.presets}
    policies = {"the search's": best, "full": kvjax.policies.full(), **presets}
    print(compared(policies, measured, samples("confirm")))


def space_of(budget: int | float, constant: bool, instructed: bool) -> Space:
    """The space of a use. Ends the program if the budget is too small for a policy of it."""
    try:
        return of_answers(int(budget)) if constant else of_prompts(budget, instructed)
    except ValueError as error:
        raise SystemExit(f"--budget {budget}: {error}") from None


def samples_of(grid: Grid, tokenizer: Any, use: str, length: int, count: int, half: str) -> list[Sample]:
    """The samples of a use: `count` of each task of this half of the tasks, or `count` texts of this half.

    Another seed of the grid draws other prompts, or takes other texts, and is part of the samples' names.
    """
    number = 2 * grid.seed + ("search", "confirm").index(half)
    suffix = f", seed {grid.seed}" if grid.seed else ""
    if use == "answers":
        texts = cut(Path(grid.data or "", ESSAYS), tokenizer, tokens=length, texts=(number + 1) * count)[-count:]
        names = [f"{half} {i} of {count}, {length} tokens{suffix}" for i in range(count)]
        return [Sample(n, row[:1], row[:0], row[1:], row.size - 2) for n, row in zip(names, texts, strict=True)]
    tasks = (WORDS if grid.model == "demo" else NEEDLES)[half]
    lines = [{"name": name, "lengths": [length], "limit": count} for name in tasks]
    asked = Grid.of({**grid.document(), "tasks": lines, "seed": number})
    items = [item for item in read_items(asked, tokenizer, length * 2) if isinstance(item, Item)]
    samples = [one for item in items for one in islice(_questions(item, use, tokenizer), 1)]
    return [replace(sample, name=sample.name + suffix) for sample in samples]


def _questions(item: Item, use: str, tokenizer: Any) -> Iterator[Sample]:
    """The questions of an item that have one answer."""
    for reading in readings([item], "before" if use == "seen" else "after", whole=True):
        for ask in reading.asks:
            text = item.example.questions[ask.index].answers[0]
            answer = np.array(tokenizer(f" {text}", add_special_tokens=False)["input_ids"], np.int32)
            prompt, turn, last = reading.prompt, ask.tail[:-1], ask.tail[-1:]
            name = f"{item.task.name} {item.example.id} {ask.index}"
            steps = np.concatenate([last, answer])
            if use == "dialogue":
                steps = np.concatenate([prompt[START:], turn, steps])
                prompt, turn = prompt[:START], turn[:0]
            yield Sample(name, prompt, turn, steps, answer.size)


def measure(
    params: Decoder, tokenizer: Any, samples: Sequence[Sample], policies: Sequence[kvjax.Policy]
) -> Iterator[tuple[kvjax.Policy, Float[np.ndarray, "N"], Bool[np.ndarray, "N"]]]:
    """The bits per counted token of each sample, and whether all of them are greedy, under each policy."""
    prompts, turns = [sample.prompt for sample in samples], [sample.turn for sample in samples]
    counts = np.array([sample.counted for sample in samples])
    steps = max(sample.steps.size for sample in samples) - 1
    tokens = np.zeros((len(samples), steps + 1), np.int32)
    for row, sample in zip(tokens, samples, strict=True):
        row[: sample.steps.size] = sample.steps
    lengths = np.array([sample.steps.size - 1 for sample in samples], np.int32)
    each = kvjax.prefill_each(params, prompts, policies=list(policies), tokenizer=tokenizer)
    for policy, cache in zip(policies, each, strict=True):
        programs.make_room((policy, len(prompts), max(map(len, prompts))))
        if any(turn.size for turn in turns):
            cache = kvjax.prefill(params, turns, cache=cache)
        cache = kvjax.with_room(cache, steps)
        bits, same = [], []
        for start in range(0, steps, CALL):
            window = tokens[:, start : start + CALL + 1]
            left = np.clip(lengths - start, 0, window.shape[1] - 1).astype(np.int32)
            cache, some, greedy = decode(params, cache, window[:, :-1], window[:, 1:], left)
            bits.append(np.asarray(some))
            same.append(np.asarray(greedy))
        place = np.arange(steps)
        counted = (place < lengths[:, None]) & (place >= (lengths - counts)[:, None])
        total = np.where(counted, np.concatenate(bits, axis=1), 0).sum(axis=1)
        yield policy, total / counts, (np.concatenate(same, axis=1) | ~counted).all(axis=1)


@jax.jit
def decode(
    params: Decoder, cache: KVCache, tokens: Int[Array, "B N"], targets: Int[Array, "B N"], lengths: Int[Array, "B"]
) -> tuple[KVCache, Float[Array, "B N"], Bool[Array, "B N"]]:
    """Decodes the first tokens of each row. Returns the bits of the targets, and where they are the most probable.

    The cache is not donated, because the caches of one prefill have arrays in common.
    """

    def step(cache: KVCache, t: Int[Array, ""]) -> tuple[KVCache, tuple[Array, Array]]:
        logits, cache = kvjax.extend(params, cache, tokens[:, t][:, None], (t < lengths).astype(jnp.int32))
        chosen, same = marks(logits, targets[:, t])
        return cache, (-chosen / jnp.log(2.0), same)

    cache, (bits, same) = jax.lax.scan(step, cache, jnp.arange(tokens.shape[1]))
    return cache, bits.T, same.T


def climbed(space: Space, measured: partial[Float[np.ndarray, "P N 2"]], rounds: int) -> kvjax.Policy:
    """The policy that no change of one part makes better by more than its interval, or that of the last round."""
    best = space.start
    for number in range(rounds):
        before = best
        for part, changes in space.parts.items():
            candidates = {"as before": best}
            for name, change in changes.items():
                try:
                    candidate = change(best)
                except ValueError as error:
                    print(f"round {number + 1}, {part}: {name}: {error}")
                    continue
                if candidate is not None and candidate not in candidates.values():
                    candidates[name] = candidate
            if len(candidates) == 1:
                continue
            found = measured(list(candidates.values()))
            print(f"\nround {number + 1}, {part}: bits per token, share of greedy answers, bits fewer than before")
            for name, of_samples in zip(candidates, found, strict=True):
                less, spread = interval(found[0, :, 0] - of_samples[:, 0])
                bits, greedy = of_samples.mean(axis=0)
                print(f"    {name:36} {bits:7.3f} {greedy:5.2f} {less:+7.3f} ±{spread:.3f}", flush=True)
            lowest = int(np.argmin(found[:, :, 0].mean(axis=1)))
            less, spread = interval(found[0, :, 0] - found[lowest, :, 0])
            if less > spread:
                best = list(candidates.values())[lowest]
        if best == before:
            break
    print(f"\n{best!r}")
    return best


def compared(policies: Mapping[str, kvjax.Policy], measured: Measured, samples: list[Sample]) -> str:
    """A table of policies beside the first of them, the one with the fewest bits first."""
    found = dict(zip(policies, measured(list(policies.values()), samples), strict=True))
    first = next(iter(policies))
    rows = [f"| policy | bits per token | greedy answers | bits above {first} |", "|---|---:|---:|---:|"]
    for name, of_samples in sorted(found.items(), key=lambda pair: pair[1][:, 0].mean()):
        more, spread = interval(of_samples[:, 0] - found[first][:, 0])
        bits, greedy = of_samples.mean(axis=0)
        rows.append(f"| {name} | {bits:.3f} | {greedy:.2f} | {more:+.3f} ±{spread:.3f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()

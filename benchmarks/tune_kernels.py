"""Finds the best tile sizes of the Triton kernels on this GPU, and writes them into the kernels' table.

    python -m benchmarks.tune_kernels > tune_kernels.jsonl            # on a GPU
    python -m benchmarks.tune_kernels --small                         # anywhere, as a check; it writes nothing

Each kind of work is timed as in `bench_kernels.py`, first with the tile sizes of the kernel's rule, and then with
combinations of rows, slots, warps and stages that fit into shared memory: all of a grid, or the `--most` that are
nearest to the rule's, where each doubling of a number and each stage counts as one. A combination that the
compiler refuses is skipped. A result that differs from XLA's ends the program with an error. The best
combination goes into pallas_kernels/triton/blocks.json if it is faster than the rule's by at least `--gain`, so that
noise changes nothing. The output is JSON lines: every measurement, then the best. Work whose best is in the file
`--resume`, the output of an earlier call, is not measured again; its best goes into the table as it did then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.bench_kernels import check, reference, several
from benchmarks.device_time import seconds
from benchmarks.kernel_cases import HEADS, Case, attention, scores, slots_of
from kvjax import pallas_kernels
from kvjax.pallas_kernels import QuantizedArray
from kvjax.pallas_kernels.triton.attention import attend_blocks
from kvjax.pallas_kernels.triton.blocks import TABLE, Blocks, Work, power_of_two, table
from kvjax.pallas_kernels.window_scores.triton import score_blocks

SHARED = 224 << 10  # bytes of shared memory per core of an H100
WRITTEN = Path(__file__).resolve().parents[1] / "pallas_kernels" / "triton" / TABLE.name


def attend(head_dim: int, rows: int, bits: int, small: bool) -> tuple[Work, Case]:
    """Query rows over the slots of a batch of caches, in 16 bits or fewer."""
    dtype, batch, slots = (jnp.float32, 1, 128) if small else (jnp.bfloat16, 8, 8192)
    width = jnp.dtype(dtype).itemsize * 8

    def draw(key: Any) -> Sequence[Any]:
        group = min(rows, 8)
        q, k, v, *positions = slots_of(key, batch, HEADS, slots, rows // group, group, dtype, head_dim)
        if bits < width:
            k, v = (QuantizedArray.of(x, bits, 32) for x in (k, v))
        return [q, k, v, *positions]

    case = Case(
        "slot_attention",
        {"head_dim": head_dim, "rows": rows, "bits": bits},
        partial(attention, scale=head_dim**-0.5),
        draw,
        (2 * batch * HEADS * slots * head_dim * bits // 8, "bytes"),
    )
    return Work.of("attend", rows, draw(jax.random.key(0))[1]), case


def window_scores(head_dim: int, rows: int, small: bool) -> tuple[Work, Case]:
    """Scores of a prompt by its last queries, or by all where these are many."""
    dtype, keys = (jnp.float32, 128) if small else (jnp.bfloat16, 65_536 if rows <= 128 else 8192)
    draw = partial(
        slots_of,
        batch=1,
        heads=HEADS,
        slots=keys,
        rows=rows // 4 if rows <= 128 else keys,
        group=4,
        dtype=dtype,
        head_dim=head_dim,
    )
    case = Case(
        "window_scores",
        {"head_dim": head_dim, "rows": rows},
        partial(scores, scale=head_dim**-0.5),
        draw,
        (HEADS * keys * head_dim * jnp.dtype(dtype).itemsize, "bytes"),
    )
    return Work.of("window_scores", rows, draw(jax.random.key(0))[1]), case


def works(small: bool) -> Iterator[tuple[Work, Case]]:
    if small:
        yield attend(64, 4, 32, small)
        yield attend(64, 4, 8, small)
        yield window_scores(64, 32, small)
        return
    for head_dim in (128, 64):
        for rows in (8, 32, 64, 256):
            yield attend(head_dim, rows, 16, small)
        for bits in (8, 4):
            yield attend(head_dim, 8, bits, small)
        for rows in (32, 128, 256):
            yield window_scores(head_dim, rows, small)


def cuts(work: Work, small: bool) -> Iterator[Blocks]:
    """The grid, without what does not fit."""
    if small:
        yield from (Blocks(power_of_two(work.rows), slots, 4, 2) for slots in (16, 32))
        return
    rows = [power_of_two(work.rows)] if work.rows <= 64 else [64, 128]
    warps = (2, 4) if work.rows <= 32 else (4, 8)
    for cut in itertools.starmap(Blocks, itertools.product(rows, (32, 64, 128, 256), warps, (2, 3, 4))):
        tiles = (2 if work.operation == "attend" else 1) * cut.slots * cut.stages  # of keys and values
        if (tiles * work.bits // 8 + cut.rows * 2) * work.head_dim <= SHARED:
            yield cut


def nearest(tried: Sequence[Blocks], rule: Blocks, most: int) -> list[Blocks]:
    """The `most` cuts that are nearest to the rule's, and not the rule's own."""

    def steps(cut: Blocks) -> float:
        doublings = sum(abs(math.log2(x / y)) for x, y in zip(cut[:3], rule[:3], strict=True))
        return doublings + abs(cut.stages - rule.stages)

    return sorted((cut for cut in tried if cut != rule), key=steps)[:most]


def rule_of(work: Work, case: Case) -> Blocks:
    """The kernel's rule, without the table."""
    keys = jax.eval_shape(case.draw, jax.random.key(0))[1]
    table().get(jax.devices()[0].device_kind, {}).pop(work.name, None)
    return attend_blocks(work.rows, keys) if work.operation == "attend" else score_blocks(work.rows, keys)


def measure(work: Work, case: Case, tried: Sequence[Blocks], repeats: int) -> Iterator[tuple[Blocks | None, float]]:
    """Each cut that the compiler takes, the rule's as None, with its seconds; it stays in the kernels' table after."""
    kind, sets = jax.devices()[0].device_kind, several(case.draw)
    expected = reference(case, sets[0])
    for cut in (None, *tried):
        table().setdefault(kind, {}).pop(work.name, None)
        if cut is not None:
            table()[kind][work.name] = list(cut)
        jax.clear_caches()  # of programs with another cut
        line = {"device": kind, "work": work.name, "cut": cut}
        try:
            check(case, sets[0], expected)
            taken = seconds(case.call, sets, repeats)
        except RuntimeError as error:  # too much shared memory, or whatever else a compiler may say
            print(json.dumps(line | {"refused": str(error).splitlines()[0]}), flush=True)
        else:
            print(json.dumps(line | {"seconds": taken}), flush=True)
            yield cut, taken


def choose(work: Work, taken: dict[Blocks | None, float]) -> dict[str, Any]:
    """The line of the best cut."""
    best = min(taken, key=lambda cut: taken[cut])
    gained = 1 - taken[best] / taken.get(None, float("inf"))
    return {"device": jax.devices()[0].device_kind, "work": work.name, "best": best, "gained": gained}


def enter(line: dict[str, Any], gain: float) -> None:
    """Leaves the best cut in the kernels' table, or none if the rule's is as good."""
    cuts = table().setdefault(line["device"], {})
    cuts.pop(line["work"], None)
    if line["best"] is not None and line["gained"] >= gain:
        cuts[line["work"]] = list(line["best"])


def bests(path: Path | None) -> Iterator[dict[str, Any]]:
    """The lines of best cuts that an earlier call wrote on this kind of device."""
    text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
    for line in text.splitlines():
        if '"best"' in line and line.endswith("}"):  # the last line of a call that was stopped may be incomplete
            found = json.loads(line)
            if found["device"] == jax.devices()[0].device_kind:
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", nargs="+", default=[""], help="only work whose name begins so")
    parser.add_argument("--small", action="store_true", help="a few cuts, interpreted, at sizes for any machine")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gain", type=float, default=0.03, help="the least that a cut must win over the rule's")
    parser.add_argument("--most", type=int, help="cuts per work; all of the grid by default")
    parser.add_argument("--resume", type=Path, help="the output of an earlier call")
    arguments = parser.parse_args()
    small = arguments.small
    if not small and pallas_kernels.implementations()["slot_attention"].name != "triton":
        parser.error("there is no GPU here, or KVJAX_KERNELS asks for something else; accepted anywhere is --small")
    done = {line["work"]: line for line in bests(arguments.resume)}
    with pallas_kernels.use("triton-interpret" if small else "default"):
        for work, case in works(small):
            if not work.name.startswith(tuple(arguments.work)):
                continue
            best = done.get(work.name)
            if best is None:
                tried = list(cuts(work, small))
                if arguments.most is not None:
                    tried = nearest(tried, rule_of(work, case), arguments.most)
                best = choose(work, dict(measure(work, case, tried, arguments.repeats)))
                print(json.dumps(best), flush=True)
            enter(best, arguments.gain)
            if not small:
                WRITTEN.write_text(json.dumps(table(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

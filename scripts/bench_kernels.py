"""Checks the kernels against the references, and measures their share of a device's bandwidth and matrix units.

    python scripts/bench_kernels.py > bench_kernels.jsonl          # on a GPU or TPU, production shapes in bfloat16
    python scripts/bench_kernels.py --small                        # anywhere, as a check that it runs

The script first measures the device's own rates: bytes of a copy, read and written, and operations of a matrix product.
Times are those of scripts/device_time.py: of kernels alone on GPUs, of calls in a row elsewhere. The output is JSON
lines: the rates, and for each case the median of `--repeats`, the necessary bytes or operations divided by that time,
and their share of the device's rate, with a goal where there is one. A case that fails, or whose result differs from
the reference's, is not timed, and the program ends with an error after the other cases. Kernels that run only if they
are chosen (`mosaic_gpu`) have cases of their own, beside the default ones on the same arrays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_time import has_cupti, seconds

from kvjax import pallas_kernels
from kvjax.pallas_kernels import PAGE, Asked, QuantizedArray, Reduction
from kvjax.pallas_kernels.write_rows.reference import write_rows

HEADS, DIM = 8, 128  # kv heads, and their channels
PER_SCALE = 32  # channels, where keys and values are quantised
ROTATED = 1 << 28  # bytes of all sets of arrays together, at least
PEAK = 8  # standard deviation of the logits, so that few entries have most of the weight
NEAR_LSE = 4.0 * PEAK  # a log-sum-exp of such logits
RELATIVE = {"bfloat16": 1e-2, "float32": 1e-3}  # the largest relative error of a result, by the dtype of the arrays
CHOICES = ("default", "mosaic_gpu")  # the second runs only if it is chosen
ABSOLUTE = {"lse": 2e-3, "indices": 0.0}  # the largest difference of results that must be close one by one


@dataclass(frozen=True)
class Case:
    """A call to be timed.

    Attributes:
        call: of the arrays that `draw` makes from a key. It returns its results by name; "lse" is a log-sum-exp.
        work: bytes that it must move, or operations, and which of these: "bytes" or "operations".
        goal: the least share of the device's rate.
        rival: what else is timed, on the same arrays; `goal` is then how many times longer that must take.
        choice: whose kernels run, as for `pallas_kernels.use`. Those of the rival are the default ones.
    """

    name: str
    facts: dict[str, Any]
    call: Callable[..., dict[str, Any]]
    draw: Callable[[Any], Sequence[Any]]
    work: tuple[int, str]
    goal: float | None = None
    rival: Callable[..., Any] | None = None
    choice: str = "default"


def several(draw: Callable[[Any], Sequence[Any]]) -> list[Sequence[Any]]:
    """Sets of arrays, as many as no cache holds, but 16 at most. One is enough if kernels are timed one by one."""
    first = draw(jax.random.key(0))
    if has_cupti():
        return [first]
    count = -(-ROTATED // sum(x.nbytes for x in jax.tree.leaves(first)))
    return [first, *(draw(jax.random.key(i)) for i in range(1, min(max(count, 2), 16)))]


def rates(small: bool, repeats: int) -> dict[str, float]:
    """Bytes/s of a copy and operations/s of a product of matrices."""
    size, side = (1 << 22, 512) if small else (1 << 29, 8192)

    def block(key: Any) -> Sequence[Any]:
        return [jax.random.normal(key, (size,), jnp.bfloat16)]

    def matrices(key: Any) -> Sequence[Any]:
        return [jax.random.normal(k, (side, side), jnp.bfloat16) for k in jax.random.split(key)]

    copy = seconds(lambda x: x + 1, [block(jax.random.key(i)) for i in range(2)], repeats)
    product = seconds(jnp.dot, [matrices(jax.random.key(i)) for i in range(2)], repeats)
    return {"bytes": 2 * 2 * size / copy, "operations": 2 * side**3 / product}


def slots_of(
    key: Any, batch: int, heads: int, slots: int, rows: int, group: int, dtype: Any, head_dim: int = DIM
) -> list[Any]:
    """q, k, v, the positions of the queries and of full slots."""
    kq, kk, kv = jax.random.split(key, 3)
    q = PEAK * jax.random.normal(kq, (batch, heads * group, rows, head_dim), dtype)
    k, v = (jax.random.normal(x, (batch, heads, slots, head_dim), dtype) for x in (kk, kv))
    at = jnp.broadcast_to(jnp.arange(slots - rows, slots), (batch, rows))
    return [q, k, v, at, jnp.broadcast_to(jnp.arange(slots), (batch, heads, slots))]


def codes_of(key: Any, bits: int, **sizes: Any) -> list[Any]:
    """The same with keys and values in so many bits."""
    q, k, v, t, p = slots_of(key, **sizes)
    return [q, *(QuantizedArray.of(x, bits, PER_SCALE) for x in (k, v)), t, p]


def attention(q: Any, k: Any, v: Any, t: Any, p: Any, scale: float) -> dict[str, Any]:
    """Attention over slots."""
    context, lse, *_ = pallas_kernels.slot_attention(q, k, v, t, p, scale=scale)
    return {"context": context, "lse": lse}


def prompt(q: Any, k: Any, v: Any, t: Any, p: Any, scale: float) -> dict[str, Any]:
    """Attention of a prompt over itself."""
    context, lse = pallas_kernels.prompt_attention(q, k, v, t, p, scale=scale)
    return {"context": context, "lse": lse}


def scored_prompt(q: Any, k: Any, v: Any, t: Any, p: Any, scale: float) -> dict[str, Any]:
    """Attention of a prompt over itself, and scores of keys by its queries."""
    context, lse, (received,) = pallas_kernels.scored_attention(q, k, v, t, p, scale=scale, reductions=(Reduction(),))
    return {"context": context, "lse": lse, "scores": received}


def scores(q: Any, k: Any, v: Any, t: Any, p: Any, scale: float) -> dict[str, Any]:
    """Scores of keys by queries whose log-sum-exp is known."""
    lse = jnp.full(q.shape[:3], NEAR_LSE)
    return {"scores": pallas_kernels.window_scores(q, k, t, p, scale=scale, lse=lse, reduction=Reduction())}


def asking(draw: Callable[..., list[Any]], facts: dict[str, int], asked: int, scale: float, nbytes: int) -> Case:
    """Attention that asks a block of MorphKV's window in its pass over the keys, beside the same in a pass each."""
    reduction = Reduction("sum", "sum", "group")

    def split(q: Any, t: Any) -> tuple[Any, Any, Asked]:
        lse = jnp.full((*q.shape[:2], asked), NEAR_LSE)
        return q[:, :, asked:], t[:, asked:], Asked(q[:, :, :asked], lse, t[:, :asked], reduction)

    def together(q: Any, k: Any, v: Any, t: Any, p: Any) -> Any:
        q, t, others = split(q, t)
        return pallas_kernels.slot_attention(q, k, v, t, p, scale=scale, received="sum", asked=others)._asdict()

    def apart(q: Any, k: Any, v: Any, t: Any, p: Any) -> Any:
        q, t, others = split(q, t)
        found = pallas_kernels.slot_attention(q, k, v, t, p, scale=scale, received="sum")
        return found, others.scores(pallas_kernels.window_scores, k, p, scale=scale, causal=False)

    facts = {**facts, "asked": asked}
    return Case("slot_attention", facts, together, partial(draw, rows=1 + asked), (nbytes, "bytes"), 1.0, rival=apart)


def experts_case(tokens: int, small: bool) -> Case:
    """The first product of tokens with their 8 of 128 experts, of the shape of Qwen3 30B-A3B."""
    count, inputs, outputs = (8, 128, 96) if small else (128, 2048, 768)
    rows, dtype = tokens * 8, jnp.float32 if small else jnp.bfloat16
    sizes = jnp.bincount(jax.random.randint(jax.random.key(0), (rows,), 0, count), length=count)

    def draw(key: Any) -> list[Any]:
        matrices = jax.random.normal(key, (count, inputs, outputs), dtype)
        return [jax.random.normal(key, (rows, inputs), dtype), matrices, sizes]

    read = (jnp.dtype(dtype).itemsize * int((sizes > 0).sum()) * inputs * outputs, "bytes")
    operations = (2 * rows * inputs * outputs, "operations")
    return Case(
        "grouped_product",
        {"rows": rows, "matrices": count},
        lambda *arrays: {"products": pallas_kernels.grouped_product(*arrays)},
        draw,
        read if tokens <= count else operations,
    )


def cases(small: bool) -> Iterator[Case]:
    """All of them; `small` ones are for any machine."""
    dtype, scale = jnp.float32 if small else jnp.bfloat16, DIM**-0.5
    width = jnp.dtype(dtype).itemsize
    of = partial(slots_of, heads=HEADS, dtype=dtype)

    shapes = [(2, 4, 256)] if small else [(8, 4, 2048), (32, 4, 2048), (8, 4, 32_768), (1, 4, 2048), (1, 8, 131_072)]
    for batch, group, slots in shapes:
        case = Case(
            "slot_attention",
            {"batch": batch, "group": group, "slots": slots},
            partial(attention, scale=scale),
            partial(of, batch=batch, slots=slots, rows=1, group=group),
            (2 * batch * HEADS * slots * DIM * width, "bytes"),
            0.85 if batch * HEADS >= 64 else 0.60,
        )
        yield case
        yield replace(case, choice="mosaic_gpu", rival=case.call, goal=1.0)
    coded = [(2, 4, 256)] if small else [(8, 4, 2048), (8, 4, 32_768), (1, 8, 131_072)]
    for bits, (batch, group, slots) in itertools.product((8, 4), coded):
        yield Case(
            "slot_attention",
            {"batch": batch, "group": group, "slots": slots, "bits": bits},
            partial(attention, scale=scale),
            partial(codes_of, bits=bits, batch=batch, heads=HEADS, slots=slots, rows=1, group=group, dtype=dtype),
            (2 * batch * HEADS * slots * (DIM * bits // 8 + 2 * DIM // PER_SCALE), "bytes"),
        )
    for batch, slots, asked in [(2, 256, 4)] if small else [(8, 2048, 4), (8, 2048, 25), (8, 32_768, 25)]:
        facts = {"batch": batch, "group": 4, "slots": slots}
        yield asking(partial(of, **facts), facts, asked, scale, 2 * batch * HEADS * slots * DIM * width)
    batch, lane = (2, 512) if small else (8, 32_768)

    def pool(key: Any) -> Sequence[Any]:
        q, k, v, t, p = of(key, batch=batch, slots=lane, rows=1, group=4)
        return [q, k[:, :1], v[:, :1], t, p[:, :1]]

    used = np.array([lane // 2 ** (2 + min(i, 3)) // PAGE * PAGE for i in range(HEADS)])
    start = np.cumsum(used) - used
    segments = [jnp.broadcast_to(jnp.asarray(x, jnp.int32), (batch, HEADS)) for x in (start, used)]
    yield Case(
        "segment_attention",
        {"batch": batch, "group": 4, "segments": used.tolist()},
        lambda q, k, v, t, p: dict(
            zip(
                ("context", "lse"),
                pallas_kernels.segment_attention(q, k, v, t, p, *segments, scale=scale)[:2],
                strict=True,
            )
        ),
        pool,
        (2 * batch * int(used.sum()) * DIM * width, "bytes"),
        0.85,
    )
    for rows, keys in [(8, 512)] if small else [(32, 131_072), (200, 32_768)]:
        yield Case(
            "window_scores",
            {"batch": 1, "group": 4, "rows": rows, "keys": keys},
            partial(scores, scale=scale),
            partial(of, batch=1, slots=keys, rows=rows, group=4),
            (HEADS * keys * DIM * width, "bytes"),
            0.80 if rows == 32 else None,
        )
    for size in [256] if small else [8192, 32_768]:
        ways = [("window_scores", scores, 2), ("prompt_attention", prompt, 4)]
        if small:  # no kernel computes both at once
            ways.append(("scored_attention", scored_prompt, 4))
        for name, call, operations in ways:
            yield Case(
                name,
                {"batch": 1, "group": 4, "tokens": size},
                partial(call, scale=scale),
                partial(of, batch=1, slots=size, rows=size, group=4),
                (operations * HEADS * 4 * size * size // 2 * DIM, "operations"),
            )
    keys, count = (2048, 64) if small else (131_072, 2048)
    counts, at = jnp.full((1, HEADS), count, jnp.int32), jnp.broadcast_to(jnp.arange(keys), (1, HEADS, keys))
    yield Case(
        "top_tokens",
        {"batch": 1, "keys": keys, "k": count},
        lambda x: {"indices": pallas_kernels.top_tokens(x, at, counts, size=count)},
        lambda key: [jax.random.normal(key, (1, HEADS, keys))],
        (HEADS * keys * 4, "bytes"),
        10.0,
        rival=lambda x: jax.lax.top_k(x, count),
    )
    yield from (experts_case(tokens, small) for tokens in ([16] if small else [64, 4096]))
    batch, slots, channels = (2, 256, 64) if small else (8, 2048, 64)

    def entries(key: Any) -> list[Any]:
        keys, values = jax.random.normal(key, (2, batch, HEADS, slots + 1, channels), dtype)
        row = jax.random.randint(key, (batch, HEADS), 0, slots)
        return [keys[:, :, 1:], values[:, :, 1:], keys[:, :, 0], values[:, :, 0], row]

    def write(by: Callable[..., Any], keys: Any, values: Any, key: Any, value: Any, row: Any) -> dict[str, Any]:
        return dict(zip(("keys", "values"), by((keys, values), row, (key, value)), strict=True))

    yield Case(  # the arrays are not donated here, so that they are copied first
        "write_rows",
        {"batch": batch, "slots": slots, "channels": channels},
        partial(write, pallas_kernels.write_rows),
        entries,
        (4 * batch * HEADS * slots * channels * width, "bytes"),
        rival=partial(write, write_rows),
    )


def reference(case: Case, arrays: Sequence[Any]) -> dict[str, Any]:
    """The results of the reference in float32."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arrays)
    with pallas_kernels.use("reference"), jax.default_matmul_precision("highest"):
        return jax.jit(case.call)(*wide)


def check(case: Case, arrays: Sequence[Any], expected: dict[str, Any]) -> dict[str, float]:
    """Returns the error of each result: the largest difference of "lse" and "indices", the relative error of others.

    The relative error is ||x - expected|| / ||expected||. A result that is no number has the error infinity.

    Raises:
        ValueError: if an error is more than rounding.
    """
    found, relative = {}, RELATIVE[jnp.dtype(arrays[0].dtype).name]
    with pallas_kernels.use(case.choice):
        results = jax.jit(case.call)(*arrays)
    for name, result in results.items():
        x, y = np.asarray(result, np.float64), np.asarray(expected[name], np.float64)
        error = np.linalg.norm(x - y) / np.linalg.norm(y) if name not in ABSOLUTE else np.max(np.abs(x - y))
        found[name] = float(error) if np.isfinite(error) else float("inf")
        allowed = ABSOLUTE.get(name, relative)
        if found[name] > allowed:
            raise ValueError(f"{case.name} {case.facts}: the error of {name} is {error:.2e}; allowed is {allowed:.2e}")
    return found


def served_by(case: Case, arrays: Sequence[Any]) -> str | None:
    """The name of the implementation that runs first; None if it was chosen and refuses the arguments."""
    with pallas_kernels.use(case.choice):
        name = pallas_kernels.implementations()[case.name].name
        chosen = name == case.choice
        return None if chosen and name not in jax.jit(case.call).lower(*arrays).as_text() else name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", help="operations; all by default")
    parser.add_argument("--choice", nargs="+", choices=CHOICES, default=CHOICES, help="whose cases; all by default")
    parser.add_argument("--small", action="store_true", help="sizes for any machine, in float32")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    device = jax.devices()[0]
    rate = rates(arguments.small, arguments.repeats)
    facts = {"device": device.device_kind, "jax": jax.__version__}
    print(json.dumps(facts | {f"{kind}_per_second": value for kind, value in rate.items()}), flush=True)
    failed = False
    for case in cases(arguments.small):
        if case.choice not in arguments.choice or (arguments.case and case.name not in arguments.case):
            continue
        line = {"case": case.name, **case.facts, "choice": case.choice}
        try:
            line |= measured(case, rate, arguments.repeats)
        except Exception as error:  # a compiler may raise anything, and the other cases are still to be measured
            line |= {"failed": f"{type(error).__name__}: {error}".partition("\n")[0]}
            failed = True
        print(json.dumps(line), flush=True)
    sys.exit(failed)


def measured(case: Case, rate: dict[str, float], repeats: int) -> dict[str, Any]:
    """The facts of a case: what served it, its errors, its time, and its share of the device's rate.

    Raises:
        ValueError: if a result is wrong.
    """
    sets = several(case.draw)
    by = served_by(case, sets[0])
    if by is None:
        return {"refused": f"{case.choice} does not serve these arguments here"}
    errors = check(case, sets[0], reference(case, sets[0]))
    with pallas_kernels.use(case.choice):
        taken = seconds(case.call, sets, repeats)
    amount, kind = case.work
    line = {"by": by, "errors": errors, "seconds": taken, f"{kind}_per_second": amount / taken}
    line |= {"of_device": amount / taken / rate[kind], "goal": case.goal}
    if case.rival is not None:
        line["rival_over_ours"] = seconds(case.rival, sets, repeats) / taken
    return line


if __name__ == "__main__":
    main()

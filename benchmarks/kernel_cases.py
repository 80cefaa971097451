"""The kernels' cases: calls, the arrays that they are timed on, and the work that a device must do for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import pallas_kernels
from kvjax.pallas_kernels import PAGE, Asked, QuantizedArray, Reduction
from kvjax.pallas_kernels.write_rows.reference import write_rows

HEADS, DIM = 8, 128  # kv heads, and their channels
PER_SCALE = 32  # channels, where keys and values are quantised
PEAK = 8  # standard deviation of the logits, so that few entries have most of the weight
NEAR_LSE = 4.0 * PEAK  # a log-sum-exp of such logits
CHOICES = ("default", "mosaic_gpu")  # whose kernels run; the second only if they are chosen


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


def beside_mosaic_gpu(case: Case) -> Iterator[Case]:
    """The case, and the same by the kernel of Mosaic GPU beside the default one."""
    yield case
    yield replace(case, choice="mosaic_gpu", rival=case.call, goal=1.0)


def cases(small: bool) -> Iterator[Case]:
    """All of them; `small` ones are for any machine."""
    dtype, scale = jnp.float32 if small else jnp.bfloat16, DIM**-0.5
    width = jnp.dtype(dtype).itemsize
    of = partial(slots_of, heads=HEADS, dtype=dtype)

    shapes = [(2, 4, 256)] if small else [(8, 4, 2048), (32, 4, 2048), (8, 4, 32_768), (1, 4, 2048), (1, 8, 131_072)]
    for batch, group, slots in shapes:
        yield from beside_mosaic_gpu(
            Case(
                "slot_attention",
                {"batch": batch, "group": group, "slots": slots},
                partial(attention, scale=scale),
                partial(of, batch=batch, slots=slots, rows=1, group=group),
                (2 * batch * HEADS * slots * DIM * width, "bytes"),
                0.85 if batch * HEADS >= 64 else 0.60,
            )
        )
    coded = [(2, 4, 256)] if small else [(8, 4, 2048), (8, 4, 32_768), (1, 8, 131_072)]
    for bits, (batch, group, slots) in itertools.product((8, 4), coded):
        case = Case(
            "slot_attention",
            {"batch": batch, "group": group, "slots": slots, "bits": bits},
            partial(attention, scale=scale),
            partial(codes_of, bits=bits, batch=batch, heads=HEADS, slots=slots, rows=1, group=group, dtype=dtype),
            (2 * batch * HEADS * slots * (DIM * bits // 8 + 2 * DIM // PER_SCALE), "bytes"),
        )
        yield from beside_mosaic_gpu(case)
    for batch, slots, asked in [(2, 256, 4)] if small else [(8, 2048, 4), (8, 2048, 25), (8, 32_768, 25)]:
        facts = {"batch": batch, "group": 4, "slots": slots}
        nbytes = 2 * batch * HEADS * slots * DIM * width
        yield from beside_mosaic_gpu(asking(partial(of, **facts), facts, asked, scale, nbytes))
    batch, lane = (2, 512) if small else (8, 32_768)

    def pool(key: Any) -> Sequence[Any]:
        q, k, v, t, p = of(key, batch=batch, slots=lane, rows=1, group=4)
        return [q, k[:, :1], v[:, :1], t, p[:, :1]]

    used = np.array([lane // 2 ** (2 + min(i, 3)) // PAGE * PAGE for i in range(HEADS)])
    start = np.cumsum(used) - used
    segments = [jnp.broadcast_to(jnp.asarray(x, jnp.int32), (batch, HEADS)) for x in (start, used)]
    segmented = Case(
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
    yield from beside_mosaic_gpu(segmented)
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
    yield Case(
        "lowest_tokens",
        {"batch": 1, "keys": keys, "count": 8},
        lambda x: {"indices": jnp.sort(pallas_kernels.lowest_tokens(x, at, count=8), axis=-1)},
        lambda key: [jax.random.normal(key, (1, HEADS, keys))],
        (HEADS * keys * 4, "bytes"),
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

"""Every backend beside the definition of each operation, and the definitions against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import pallas_kernels
from kvjax.pallas_kernels import Reduction
from tests.dense import assert_close, attention, context, entries, left_padded
from tests.pallas_kernels.cases import TOLERANCE, Case
from tests.pallas_kernels.checks import (
    check_extra,
    check_prompt,
    check_segments,
    check_slots,
    check_window,
    jitted,
    on_gpu,
    reduced,
)

dispatch = import_module("kvjax.pallas_kernels.dispatch")
GPU = "" if on_gpu() else "-interpret"
CHOICES = ("reference", "xla", f"triton{GPU}", f"mosaic_gpu{GPU}", "mosaic_tpu-interpret")


def check_scored(kernel: Callable[..., Any], window: int | None, softcap: float | None) -> None:
    rng, group, new, slots = np.random.default_rng(0), 3, 23, 40
    t = left_padded([new, 9, 0], new, [60, 20, 20])
    q = rng.normal(size=(3, 2 * group, new, 16)).astype(np.float32)
    k, v, cached = entries(rng, 3, 2, slots + new, [60, 20, 20], head_dim=16)
    p = np.concatenate([cached[..., :slots], np.broadcast_to(t[:, None], (3, 2, new))], axis=2)
    kinds = Reduction("sum", "mean"), Reduction("max", "sum", "group"), Reduction("sum", "max", "rows")
    options = {"window": window, "softcap": softcap}
    out, lse, scores = kernel(q, k, v, t, p, scale=0.35, reductions=kinds, **options)
    weights, expected_lse, seen = attention(q, k, t, p, 0.35, **options)
    assert_close(out, context(weights, v))
    assert_close(lse, expected_lse)
    for score, kind in zip(scores, kinds, strict=True):
        assert_close(score, reduced(weights, seen, kind))


def check_top(kernel: Callable[..., Any], size: int) -> None:
    """Heads have ties, signed zeros, infinities and NaN, no score above -inf, or one score only."""
    rng = np.random.default_rng(size)
    special = np.float32([-np.inf, np.inf, -0.0, 0.0, 1.0, -1.0, 1e-30, 3.4e38, -3.4e38, np.nan, *rng.normal(size=7)])
    scores = rng.choice(special, size=(2, 4, 40))
    scores[0, 0] = -np.inf
    scores[0, 1] = scores[0, 1, 0]
    positions = np.stack([rng.permutation(40) for _ in range(8)]).reshape(2, 4, 40)
    counts = rng.integers(0, min(size, 40) + 1, (2, 4))
    got = kernel(scores, positions, counts, size=size)
    for b, h in np.ndindex(2, 4):
        ranked = sorted(np.flatnonzero(scores[b, h] > -np.inf), key=lambda i: (-scores[b, h, i], positions[b, h, i]))
        chosen = sorted(ranked[: counts[b, h]])
        assert got[b, h].tolist() == chosen + [-1] * (size - len(chosen))


def check_lowest(kernel: Callable[..., Any], count: int) -> None:
    """Scores are equal, infinite, no numbers, or fewer than are asked for."""
    rng = np.random.default_rng(count)
    scores = rng.choice(np.float32([0, -0.0, 1, 2, -1.5, -np.inf, np.nan, np.inf, np.inf]), size=(16, 3, 12))
    scores[0, 0, 1:] = np.inf
    positions = np.stack([rng.permutation(12) for _ in range(48)]).reshape(16, 3, 12).astype(np.int32)
    got = kernel(scores, positions, count=count)
    for b, h in np.ndindex(16, 3):
        own = np.where(np.isnan(scores[b, h]), -np.inf, scores[b, h])
        ranked = sorted(range(12), key=lambda slot: (own[slot], -positions[b, h, slot]))
        expected = sorted(slot for slot in ranked[:count] if own[slot] < np.inf)
        assert got[b, h].tolist() == expected + [12] * (count - len(expected))


def check_products(kernel: Callable[..., Any], dtype: str) -> None:
    rng, sizes = np.random.default_rng(1), np.int32([0, 70, 0, 1, 33, 0])
    rows = rng.normal(size=(104, 72)).astype(dtype)
    matrices = (rng.normal(size=(6, 72, 40)) / 8).astype(dtype)
    got = kernel(rows, matrices, sizes)
    of_row = matrices.astype(np.float64)[np.repeat(np.arange(6), sizes)]
    assert_close(got, np.einsum("mi,mio->mo", rows.astype(np.float64), of_row), *TOLERANCE[dtype])


# operation, and a check of an implementation
TABLE: list[tuple[str, Callable[..., None]]] = [
    ("slot_attention", partial(check_slots, case=Case(128, 4, 1, 304, "bfloat16", bias="some", window=100))),
    ("slot_attention", partial(check_slots, case=Case(80, 3, 2, 70, softcap=0.8, window=60, received="mean"))),
    ("slot_attention", partial(check_slots, case=Case(128, 4, 1, 300, bits=8))),
    (
        "slot_attention",
        partial(
            check_extra, case=Case(96, 4, 1, 90, bias="some"), count=25, reduction=Reduction("max", "sum", "group")
        ),
    ),
    (
        "segment_attention",
        partial(check_segments, case=Case(64, 4, 3, 0, softcap=0.8, bias="some"), lanes=2, empty=9.0),
    ),
    ("segment_attention", partial(check_segments, case=Case(64, 4, 1, 0, "bfloat16"), lanes=2, empty=9.0)),
    ("window_scores", partial(check_window, case=Case(64, 3, 20, 40, reduction=Reduction("sum", "max"), window=30))),
    ("window_scores", partial(check_window, case=Case(96, 5, 8, 70, lse=False, bias="some"))),
    ("prompt_attention", partial(check_prompt, case=Case(64, 2, 40, 0, softcap=0.8, bias="some"), slots=37)),
    ("prompt_attention", partial(check_prompt, case=Case(128, 2, 130, 0, "bfloat16"), slots=30)),
    ("scored_attention", partial(check_scored, window=None, softcap=0.8)),
    ("scored_attention", partial(check_scored, window=9, softcap=None)),
    *(("top_tokens", partial(check_top, size=size)) for size in (5, 50)),
    *(("lowest_tokens", partial(check_lowest, count=count)) for count in (1, 4)),
    *(("grouped_product", partial(check_products, dtype=dtype)) for dtype in ("float32", "bfloat16")),
]


def beside_the_definition(operation: str, choice: str) -> Callable[..., Any]:
    """An operation as `choice` computes it. The results are compared with those of the definition first."""

    def by(choice: str, *arrays: Any, **options: Any) -> Any:
        with pallas_kernels.use(choice):
            found = jitted(getattr(pallas_kernels, operation))(*arrays, **options)
        return np.sort(found, axis=-1) if operation == "lowest_tokens" else found  # these have any order

    def call(*arrays: Any, **options: Any) -> Any:
        got, defined = (by(each, *arrays, **options) for each in (choice, "reference"))
        assert jax.tree.structure(got) == jax.tree.structure(defined)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(defined), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            if jnp.issubdtype(x.dtype, jnp.integer):
                np.testing.assert_array_equal(x, y)
            else:
                assert_close(x, y, *TOLERANCE[x.dtype.name])
        return got

    return call


def cells() -> list[Any]:
    """Each row of the table with each backend that the operation has. Kernels are interpreted, which is slow."""
    found = []
    for (operation, check), choice in ((row, choice) for row in TABLE for choice in CHOICES):
        backend = choice.removesuffix(dispatch.INTERPRET)
        if choice != "reference" and backend not in dispatch._operations[operation]:
            continue
        case = check.keywords.get("case")
        if backend == "mosaic_gpu" and case.dtype != "bfloat16":
            continue  # it serves numbers of 16 bits
        if backend == "xla" and case is not None and case.dtype == "bfloat16":
            continue  # it rounds scaled queries; the tests of each operation have scales that are powers of two
        marks = () if choice in ("reference", "xla") else pytest.mark.slow
        detail = "-".join(str(x) for x in check.keywords.values())
        found.append(pytest.param(operation, check, choice, marks=marks, id=f"{operation}-{choice}-{detail}"))
    return found


@pytest.mark.filterwarnings("error::UserWarning")  # dispatch would warn of a backend that refuses
@pytest.mark.parametrize(("operation", "check", "choice"), cells())
def test_backends_compute_what_the_reference_defines(operation: str, check: Any, choice: str) -> None:
    check(beside_the_definition(operation, choice))


def test_the_table_has_every_backend_of_every_operation() -> None:
    """Two are missing: cuDNN, which nothing interprets, and `write_rows`, which is tested beside its scatter."""
    operations = {name: set(backends) - {"cudnn"} for name, backends in dispatch._operations.items()}
    del operations["write_rows"]
    tried: dict[str, set[str]] = {}
    for operation, _, choice in (cell.values for cell in cells()):
        tried.setdefault(operation, set()).add(choice.removesuffix(dispatch.INTERPRET))
    assert tried == {name: backends | {"reference"} for name, backends in operations.items()}

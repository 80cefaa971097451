"""The Mosaic GPU kernel against float64, compiled on a GPU that it serves and interpreted elsewhere; compiled ahead."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import QuantizedArray, Reduction
from kvjax.pallas_kernels.slot_attention.asked import ExtraReduction, ExtraRows
from tests.dense import assert_close, attention, context
from tests.pallas_kernels.cases import Case
from tests.pallas_kernels.checks import check_extra, check_segments, check_slots, jitted, on_gpu
from tests.pallas_kernels.ptx import accelerator, compile_for, read, tool
from tests.products import part

shared, kernel, slot, segment = (
    import_module(f"kvjax.pallas_kernels.{name}")
    for name in (
        "mosaic_gpu.common",
        "mosaic_gpu.attention",
        "slot_attention.mosaic_gpu",
        "segment_attention.mosaic_gpu",
    )
)
INTERPRET = not on_gpu()
here = partial(jitted, interpret=INTERPRET)
NAME = "mosaic_gpu_attend_mosaic_gpu_kernel"


@pytest.fixture
def served() -> None:
    """Skips the test on a GPU that the kernel does not serve."""
    try:
        if not INTERPRET:
            shared.products_for(16, shared.capability())
    except NotImplementedError as reason:
        pytest.skip(str(reason))


CASES = [
    Case(64, 1, 1, 48, "bfloat16"),  # one tile, that reaches beyond the slots
    Case(128, 4, 1, 304, "bfloat16", bias="some", window=100),  # three splits
    Case(96, 7, 3, 200, "float16", softcap=0.8),
    Case(128, 4, 16, 192, "bfloat16", bias="none"),
    Case(256, 5, 1, 136, "bfloat16", window=30),
    Case(64, 4, 1, 40, "bfloat16", huge=True),
    Case(32, 2, 8, 512, "float16", bias="some"),
    Case(128, 4, 1, 304, "bfloat16", bias="some", window=100, received="mean"),
    Case(96, 7, 3, 200, "float16", softcap=0.8, received="max"),
    Case(64, 1, 1, 40, "bfloat16", bias="none", received="sum"),
    Case(128, 4, 1, 304, "bfloat16", bits=8),
    Case(128, 7, 3, 136, "bfloat16", bits=4, bias="some", window=100, received="max"),
    Case(256, 2, 1, 48, "float16", bits=8, per_scale=64),
    Case(128, 1, 1, 72, "bfloat16", bits=4, per_scale=128),  # one scale for both halves
]
EXTRA_CASES = [
    (Case(64, 4, 1, 200, "bfloat16", bias="some"), 4, Reduction("sum", "sum", "group")),
    (Case(96, 4, 1, 96, "bfloat16", bias="some"), 25, Reduction("max", "sum", "group")),  # a tile per query head
    (Case(128, 7, 1, 136, "float16", window=100, received="sum"), 7, Reduction("max", "mean", "group")),
    (Case(64, 2, 3, 64, "bfloat16", softcap=0.8), 70, Reduction("max", "max", "rows")),  # three tiles
    (Case(64, 2, 1, 72, "bfloat16", bits=8), 4, Reduction("sum", "sum", "group")),
]
SEGMENT_CASES = [
    (Case(64, 4, 3, 0, "bfloat16", softcap=0.8, bias="some"), 2, None),
    (Case(64, 4, 1, 0, "bfloat16"), 1, (4, Reduction("sum", "sum", "group"))),
    (Case(128, 1, 1, 0, "float16", window=90), 4, None),
    (Case(96, 7, 2, 0, "bfloat16", bias="some"), 2, (7, Reduction("max", "mean", "group"))),
    (Case(128, 2, 1, 0, "bfloat16", bits=4), 2, (4, Reduction("sum", "sum", "group"))),
]


@pytest.mark.slow(first=1)
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("case", part(CASES, [*CASES[:3], CASES[8]]), ids=str)
def test_slot_attention(case: Case) -> None:
    check_slots(here(slot.slot_attention), case)


@pytest.mark.slow(first=1)
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("case", "count", "reduction"), EXTRA_CASES)
def test_extra_query_rows(case: Case, count: int, reduction: Reduction) -> None:
    check_extra(here(slot.slot_attention), case, count, reduction)


@pytest.mark.slow(first=2)
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("case", "lanes", "extra"), SEGMENT_CASES)
def test_segment_attention(case: Case, lanes: int, extra: Any) -> None:
    """Rows of a pool beside a segment hold other numbers, which count nowhere, and logits of no other head change."""
    check_segments(here(segment.segment_attention), case, lanes, extra=extra, empty=9.0)


@pytest.mark.slow
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("used", "splits"), [(1024, 3), (1000, 16), (40, 16)])
def test_programs_share_the_occupied_tiles(used: int, splits: int) -> None:
    """Three or sixteen programs share sixteen tiles, or one: the others then add nothing. The logits have peaks."""
    rng = np.random.default_rng(used)
    k, v = rng.normal(size=(2, 1, 1, 1024, 32)).astype(jnp.bfloat16)
    q = (8 * rng.normal(size=(1, 4, 1, 32))).astype(jnp.bfloat16)
    p = np.where(np.arange(1024) < used, rng.permutation(1024), -1).astype(np.int32)[None, None]
    t = np.full((1, 1), 1024, np.int32)
    products = "lax" if INTERPRET else shared.products_for(4, shared.capability())
    attend = jax.jit(partial(kernel.attend, scale=32**-0.5, products=products, tile=64, splits=splits))
    out, lse, *_ = attend(q.reshape(1, 1, 4, 32), k, v, t, p)
    weights, expected_lse, _ = attention(q, k, t, p, 32**-0.5)
    assert np.abs(expected_lse).max() > 8
    assert_close(np.asarray(out).reshape(1, 4, 1, 32), context(weights, v), 1e-2, 2e-2)
    assert_close(np.asarray(lse).reshape(1, 4, 1), expected_lse, 1e-5, 1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("served")
def test_tiles_beyond_the_last_occupied_slot_are_not_read() -> None:
    """NaN values in the last tile that is read make the context NaN. NaN values after it do not."""
    rng = np.random.default_rng(0)
    tile, slots = kernel.tile_slots(128), 256
    q = rng.normal(size=(1, 2, 1, 128)).astype(jnp.bfloat16)
    k, v = rng.normal(size=(2, 1, 1, slots, 128)).astype(jnp.bfloat16)
    call = jax.jit(partial(slot.slot_attention, scale=0.1, interpret=INTERPRET))
    for bound in (tile, tile + 1):
        p = np.where(np.arange(slots) < bound, np.arange(slots), -1)[None, None]
        read_slots = -(-bound // tile) * tile
        for first, is_nan in ((read_slots, False), (read_slots - 1, True)):
            values = np.where(np.arange(slots)[:, None] < first, v, jnp.bfloat16(np.nan))
            out = np.asarray(call(q, k, values, np.full((1, 1), slots), p).context, np.float32)
            assert np.isnan(out).all() == is_nan == np.isnan(out).any()


def test_programs_are_enough_for_a_gpu() -> None:
    """One row of 8 kv heads and 2,048 slots of 128 channels takes 128 programs, of two tiles each."""
    tile = kernel.tile_slots(128)
    assert [kernel.tile_slots(D) for D in (32, 64, 96, 128, 256)] == [128, 128, 64, 64, 64]
    assert 8 * kernel.splits_of(8, 2048, tile) == 128
    assert 8 * kernel.splits_of(8, 131_072, tile) == 264
    assert [kernel.splits_of(*sizes, tile) for sizes in ((1, 131_072), (512, 2048), (8, 8))] == [64, 1, 1]


def test_products_by_gpu_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MMA", object())
    assert [shared.products_for(rows, (9, 0)) for rows in (1, 16, 17)] == ["mma", "mma", "wgmma"]
    assert [shared.products_for(rows, (10, 0)) for rows in (1, 16, 17)] == ["mma"] * 3
    monkeypatch.setattr(shared, "MMA", None)
    assert shared.products_for(1, (9, 0)) == "wgmma"
    with pytest.raises(NotImplementedError, match=r"compute capability 10\.0: expected JAX 0\.11"):
        shared.products_for(1, (10, 0))


@pytest.mark.parametrize("found", ["8.0", "12.0", "gfx942"])
def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [type("Gpu", (), {"compute_capability": found})])
    with pytest.raises(NotImplementedError, match=rf"capability {found}: expected 9\.x or 10\.x"):
        call(np.zeros((1, 1, 1, 64), jnp.bfloat16), slots=8)


def call(q: Any, slots: int, dtype: Any = jnp.bfloat16, **options: Any) -> Any:
    """Calls the kernel with one kv head, if the arguments are not refused."""
    k, t = np.zeros((1, 1, slots, q.shape[-1]), dtype), np.zeros((1, q.shape[2]), np.int32)
    return slot.slot_attention(q, k, k, t, np.zeros((1, 1, slots), np.int32), scale=1.0, **options)


@pytest.mark.parametrize(
    ("shape", "slots", "dtypes", "reason"),
    [
        ((1, 1, 1, 64), 8, ("float32", "float32"), "dtypes float32: expected one of bfloat16 and float16"),
        ((1, 1, 1, 64), 8, ("float16", "bfloat16"), "dtypes bfloat16, float16: expected one of"),
        ((1, 1, 1, 80), 8, ("bfloat16", "bfloat16"), "heads of 80 channels: expected a multiple of 32"),
        ((1, 1, 1, 288), 8, ("bfloat16", "bfloat16"), "heads of 288 channels: expected .* at most 256"),
        ((1, 1, 1, 64), 9, ("bfloat16", "bfloat16"), "9 slots: expected a multiple of 8"),
        ((1, 5, 13, 64), 8, ("bfloat16", "bfloat16"), "65 query rows per kv head: expected at most 64"),
        ((1, 5, 7, 256), 8, ("bfloat16", "bfloat16"), "35 query rows of 256 channels, as 64 rows: expected at most"),
    ],
)
def test_other_arguments_are_refused(shape: Any, slots: int, dtypes: tuple[str, str], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        call(np.zeros(shape, jnp.dtype(dtypes[0])), slots, jnp.dtype(dtypes[1]), interpret=True)


@pytest.mark.parametrize(
    ("bits", "per_scale", "reason"),
    [
        (8, 16, "4 scales of 64 channels in 8 bits: expected one for a multiple of 32 channels"),
        (4, 64, None),
        (4, 16, "4 scales of 64 channels in 4 bits"),
    ],
)
def test_codes_with_many_scales_are_refused(bits: int, per_scale: int, reason: str | None) -> None:
    q, t = np.zeros((1, 1, 1, 64), jnp.bfloat16), np.zeros((1, 1), np.int32)
    k = jax.jit(lambda: QuantizedArray.of(jnp.zeros((1, 1, 8, 64), jnp.bfloat16), bits, per_scale))()
    with pytest.raises(NotImplementedError, match=reason) if reason else nullcontext():
        slot.slot_attention(q, k, k, t, np.zeros((1, 1, 8), np.int32), scale=1.0, interpret=True)


@dataclass(frozen=True)
class Problem:
    """Sizes and options of a kernel that is compiled ahead, for 8 kv heads.

    Attributes:
        lanes: of a pool, with segments; 8 lanes are slots.
        bits: of codes, with a scale for 32 channels; None for keys and values as they are.
        extra: extra query rows per kv head.
    """

    group: int = 4
    queries: int = 1
    channels: int = 128
    slots: int = 2048
    batch: int = 8
    bias: bool = False
    window: int | None = None
    dtype: Any = jnp.bfloat16
    lanes: int = 8
    logits: bool = False
    extra: int = 0
    bits: int | None = None

    def numbers(self, slots: tuple[int, ...]) -> Any:
        """The shape of keys or values, or those of their codes and scales."""
        D, bits = self.channels, self.bits
        if bits is None:
            return (*slots, D), self.dtype
        codes, scales = ((*slots, D * bits // 8), jnp.int8), ((*slots, D // 32), jnp.bfloat16)
        return QuantizedArray(codes, scales, bits, jnp.dtype(self.dtype))

    def shapes(self) -> dict[str, Any]:
        B, D, R, X = self.batch, self.channels, self.group * self.queries, self.extra
        slots = (B, self.lanes, self.slots)
        return {
            "q": ((B, 8, R, D), self.dtype),
            "k": self.numbers(slots),
            "v": self.numbers(slots),
            "q_positions": ((B, self.queries), jnp.int32),
            "k_positions": (slots, jnp.int32),
            **({"bias": (slots, jnp.float32)} if self.bias else {}),
            **({"used": ((B, 8), jnp.int32), "start": ((B, 8), jnp.int32)} if self.lanes < 8 else {}),
            **({"queries": ((B, 8, X, D), self.dtype), "lse": ((B, 8, X), jnp.float32)} if X else {}),
            **({"positions": ((B, X), jnp.int32)} if X else {}),
        }


PROBLEMS = {
    "decode-8b-2k": Problem(),
    "decode-70b-128k": Problem(group=8, slots=131_072, batch=1),
    "decode-96-channels-ragged": Problem(group=7, channels=96, slots=2008, bias=True, window=4096, dtype=jnp.float16),
    "decode-past-2**31": Problem(slots=131_072, batch=32),
    "question-8b-2k": Problem(queries=16, batch=1, bias=True, window=4096),
    "decode-256-channels": Problem(channels=256),
    "received-8b-2k": Problem(logits=True),
    "asked-8b-2k": Problem(extra=16),
    "asked-100-rows": Problem(extra=128, logits=True),
    "segments-8b": Problem(lanes=2, bias=True, logits=True, extra=16),
    "decode-8-bits": Problem(bits=8),
    "decode-4-bits": Problem(bits=4),
    "segments-4-bits": Problem(bits=4, lanes=1, extra=16, logits=True, slots=8192),
    "segments-70b": Problem(group=8, lanes=1, batch=1, slots=131_072),
}
WAYS = (("h200", "wgmma"), ("h200", "mma"), ("b200", "mma"))
# The first is refused, because it needs too many registers. So does the second; wgmma is used there.
UNUSED = (("decode-256-channels", "h200", "wgmma"), ("question-8b-2k", "h200", "mma"))


def compile_problem(problem: str, name: str, products: str, folder: Path) -> None:
    device, of = accelerator(name), PROBLEMS[problem]

    def attend(**arrays: Any) -> Any:
        options: dict[str, Any] = {"scale": 0.09, "window": of.window, "logits": of.logits, "products": products}
        if of.extra:
            options["extra"] = ExtraRows._make(arrays.pop(field) for field in ExtraRows._fields)
            options["extra_reduction"] = ExtraReduction(16, "sum", "max")
        return kernel.attend(**arrays, **options)

    with jax.default_device(device):  # from which Mosaic reads the compute capability
        compile_for(device, attend, of.shapes(), folder)


@pytest.mark.aot
@pytest.mark.skipif(not INTERPRET, reason="a GPU is here")
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")  # of absent devices
@pytest.mark.parametrize(
    ("problem", "name", "products"),
    part(
        [case for problem in PROBLEMS for way in WAYS if (case := (problem, *way)) not in UNUSED],
        {
            *(("decode-8b-2k", *way) for way in WAYS),
            ("question-8b-2k", "h200", "wgmma"),
            ("decode-96-channels-ragged", "b200", "mma"),
            ("segments-8b", "h200", "mma"),
        },
    ),
)
def test_compiles(problem: str, name: str, products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No register is spilled, products run on tensor cores, and TMA copies to shared memory.

    A process of its own compiles: after one kind of GPU, Mosaic compiles for no other.
    """
    if products == "mma" and shared.MMA is None:
        pytest.skip("Mosaic GPU has mma since JAX 0.11")
    accelerator(name)
    tool("ptxas")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    process = get_context("spawn").Process(target=compile_problem, args=(problem, name, products, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0
    (path,) = (path for path in tmp_path.glob("*.ptx") if NAME in path.read_text())
    (found,) = read(path)
    print(problem, name, found)
    assert (found.name, found.spilled, found.products) == (NAME, 0, (products,))
    assert "cp.async.bulk.tensor" in path.read_text()

"""The Mosaic GPU kernel against float64, compiled on a GPU that it serves and interpreted elsewhere; compiled ahead."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Asked, QuantizedArray, Reduction
from tests.dense import assert_close, attention, context
from tests.pallas_kernels.cases import Case
from tests.pallas_kernels.checks import check_slots, jitted, on_gpu
from tests.pallas_kernels.ptx import accelerator, compile_for, read, tool
from tests.products import part

shared, kernel = (
    import_module(f"kvjax.pallas_kernels.{name}") for name in ("mosaic_gpu.common", "slot_attention.mosaic_gpu")
)
INTERPRET = not on_gpu()
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
]


@pytest.mark.slow(first=1)
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("case", part(CASES, CASES[:3]), ids=str)
def test_slot_attention(case: Case) -> None:
    check_slots(jitted(kernel.slot_attention, interpret=INTERPRET), case)


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
    out, lse = attend(q.reshape(1, 1, 4, 32), k, v, t, p)
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
    call = jax.jit(partial(kernel.slot_attention, scale=0.1, interpret=INTERPRET))
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
    return kernel.slot_attention(q, k, k, t, np.zeros((1, 1, slots), np.int32), scale=1.0, **options)


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


def test_what_slots_receive_extra_rows_and_codes_are_refused() -> None:
    q, t = np.zeros((1, 1, 1, 64), jnp.bfloat16), np.zeros((1, 1), np.int32)
    asked = Asked(q, np.zeros((1, 1, 1), np.float32), t, Reduction("sum", "sum", "group"))
    for options in ({"received": "sum"}, {"asked": asked}):
        with pytest.raises(NotImplementedError, match="what slots receive or earlier queries are asked"):
            call(q, 8, interpret=True, **options)
    k = jax.eval_shape(lambda: QuantizedArray.of(np.zeros((1, 1, 8, 64), jnp.bfloat16), 8, 32))
    with pytest.raises(NotImplementedError, match="of type QuantizedArray: expected plain arrays"):
        kernel.slot_attention(q, k, k, t, np.zeros((1, 1, 8), np.int32), scale=1.0, interpret=True)


# (query heads per kv head, queries, channels, slots, batch, bias, window, dtype)
PROBLEMS = {
    "decode-8b-2k": (4, 1, 128, 2048, 8, False, None, jnp.bfloat16),
    "decode-70b-128k": (8, 1, 128, 131_072, 1, False, None, jnp.bfloat16),
    "decode-96-channels-ragged": (7, 1, 96, 2008, 8, True, 4096, jnp.float16),
    "decode-past-2**31": (4, 1, 128, 131_072, 32, False, None, jnp.bfloat16),
    "question-8b-2k": (4, 16, 128, 2048, 1, True, 4096, jnp.bfloat16),
    "decode-256-channels": (4, 1, 256, 2048, 8, False, None, jnp.bfloat16),
}
WAYS = (("h200", "wgmma"), ("h200", "mma"), ("b200", "mma"))
# The first is refused, because it needs too many registers. So does the second; wgmma is used there.
UNUSED = (("decode-256-channels", "h200", "wgmma"), ("question-8b-2k", "h200", "mma"))


def compile_problem(problem: str, name: str, products: str, folder: Path) -> None:
    device = accelerator(name)
    G, W, D, S, B, bias, window, dtype = PROBLEMS[problem]
    slots = (B, 8, S)
    shapes = {
        "q": ((B, 8, G * W, D), dtype),
        "k": ((*slots, D), dtype),
        "v": ((*slots, D), dtype),
        "q_positions": ((B, W), jnp.int32),
        "k_positions": (slots, jnp.int32),
    } | ({"bias": (slots, jnp.float32)} if bias else {})
    attend = partial(kernel.attend, scale=0.09, window=window, products=products)
    with jax.default_device(device):  # from which Mosaic reads the compute capability
        compile_for(device, attend, shapes, folder)


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

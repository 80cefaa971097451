"""The Triton kernels, compiled for absent GPUs at realistic sizes: registers, spills, tensor cores."""

from __future__ import annotations

import re
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.aot.targets import Gpu, Target
from kvjax.pallas_kernels import Asked, QuantizedArray, Reduction
from tests.pallas_kernels.ptx import accelerator, compile_for, longest_loop, tool
from tests.products import part

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache"),  # of absent devices
]
KV_HEADS = 8
SUMS, MAXIMA = (Reduction(rows, "sum", "group") for rows in ("sum", "max"))
KERNELS = {
    "prompt_attention": {"attend_kernel"},
    "slot_attention": {"attend_kernel"},
    "segment_attention": {"attend_kernel"},
    "window_scores": {"window_scores_kernel"},
    "top_tokens": {"top_tokens_kernel"},
    "grouped_product": {"grouped_product_kernel"},
}
# Bytes of a thread's registers. Eight warps would spill none; a device has to show which of both is faster.
SPILLED = {("prompt-2b-4k-softcap", "NVIDIA A100-SXM4-80GB"): 40}


def attention(
    group: int,
    batch: int,
    slots: int,
    queries: int = 1,
    dtype: Any = jnp.bfloat16,
    head_dim: int = 128,
    value_dim: int | None = None,
):
    heads = batch, KV_HEADS
    return {
        "q": ((batch, KV_HEADS * group, queries, head_dim), dtype),
        "k": ((*heads, slots, head_dim), dtype),
        "v": ((*heads, slots, value_dim or head_dim), dtype),
        "q_positions": ((batch, queries), jnp.int32),
        "k_positions": ((*heads, slots), jnp.int32),
    }


def quantized(shapes: dict[str, Any], bits: int, per_scale: int = 32):
    """The same shapes with quantised keys and values."""
    (*entries, D), dtype = shapes["k"]
    codes, scales = ((*entries, D * bits // 8), jnp.int8), ((*entries, D // per_scale), jnp.bfloat16)
    return shapes | dict.fromkeys("kv", QuantizedArray(codes, scales, bits, jnp.dtype(dtype)))


def with_extra(group: int, batch: int, slots: int, extra: int, **options: Any):
    """Attention with extra query rows, as MorphKV uses them in a decode step."""
    rows = batch, KV_HEADS * group, extra
    shapes = attention(group, batch, slots, **options)
    (*_, head_dim), dtype = shapes["q"]
    return shapes | {
        "asked": ((*rows, head_dim), dtype),
        "asked_lse": (rows, jnp.float32),
        "asked_positions": ((batch, extra), jnp.int32),
    }


def segments(group: int, batch: int, rows: int):
    bounds = {name: ((batch, KV_HEADS), jnp.int32) for name in ("start", "used")}
    return attention(group, batch, rows) | bounds


def window(group: int, queries: int, keys: int, lse: bool = True):
    shapes = attention(group, 1, keys, queries)
    del shapes["v"]
    return shapes | ({"lse": (shapes["q"][0][:3], jnp.float32)} if lse else {})


def scores(batch: int, entries: int):
    rows = batch, KV_HEADS
    return {
        "scores": ((*rows, entries), jnp.float32),
        "positions": ((*rows, entries), jnp.int32),
        "counts": (rows, jnp.int32),
    }


def experts(rows: int, count: int, inputs: int, outputs: int, dtype: Any = jnp.bfloat16):
    return {
        "rows": ((rows, inputs), dtype),
        "matrices": ((count, inputs, outputs), dtype),
        "sizes": ((count,), jnp.int32),
    }


# (operation, static arguments, shapes). Models of 8, 14, 7 and 70 billion parameters have groups of 4, 5, 7 and 8.
PROBLEMS = {
    "decode-8b-2k": ("slot_attention", {}, attention(4, 8, 2048)),
    "decode-14b-2k-received": ("slot_attention", {"received": "mean"}, attention(5, 8, 2048)),
    "decode-70b-128k": ("slot_attention", {}, attention(8, 1, 131_072)),
    "decode-8b-2k-float32": ("slot_attention", {}, attention(4, 8, 2048, dtype=jnp.float32)),
    "decode-256-channels": ("slot_attention", {}, attention(4, 8, 2048, head_dim=256)),
    "decode-96-channels": ("slot_attention", {}, attention(4, 8, 2048, head_dim=96)),
    "decode-77-of-128-channels": ("slot_attention", {}, attention(4, 8, 2048, head_dim=77, value_dim=128)),
    "decode-80-of-128-channels": ("slot_attention", {}, attention(4, 8, 2048, head_dim=80, value_dim=128)),
    "question-8b-128k": ("slot_attention", {}, attention(4, 1, 131_072, queries=32)),
    "decode-past-2**31": ("slot_attention", {}, attention(4, 32, 131_072)),
    "decode-8b-2k-extra-4": ("slot_attention", {"received": "sum", "reduction": SUMS}, with_extra(4, 8, 2048, 4)),
    "decode-8b-2k-extra-25": ("slot_attention", {"received": "sum", "reduction": SUMS}, with_extra(4, 8, 2048, 25)),
    "decode-8b-2k-extra-4-maxima": (
        "slot_attention",
        {"received": "sum", "reduction": MAXIMA},
        with_extra(4, 8, 2048, 4),
    ),
    "decode-7b-32k-extra-25": ("slot_attention", {"received": "sum", "reduction": SUMS}, with_extra(7, 1, 32_768, 25)),
    "decode-8b-2k-extra-4-float32": (
        "slot_attention",
        {"received": "sum", "reduction": SUMS},
        with_extra(4, 8, 2048, 4, dtype=jnp.float32),
    ),
    "decode-8b-2k-extra-4-8-bits": (
        "slot_attention",
        {"received": "sum", "reduction": SUMS},
        quantized(with_extra(4, 8, 2048, 4), 8),
    ),
    "decode-8b-2k-extra-25-4-bits": (
        "slot_attention",
        {"received": "sum", "reduction": SUMS},
        quantized(with_extra(4, 8, 2048, 25), 4),
    ),
    "segments-8b": ("segment_attention", {}, segments(4, 8, 65_536)),
    "segments-70b": ("segment_attention", {}, segments(8, 1, 262_144)),
    "decode-8b-2k-8-bits": ("slot_attention", {}, quantized(attention(4, 8, 2048), 8)),
    "decode-8b-2k-4-bits": ("slot_attention", {}, quantized(attention(4, 8, 2048), 4)),
    "decode-8b-2k-8-bits-received": ("slot_attention", {"received": "max"}, quantized(attention(4, 8, 2048), 8, 128)),
    "decode-70b-128k-4-bits": ("slot_attention", {}, quantized(attention(8, 1, 131_072), 4, 128)),
    "question-8b-128k-4-bits": ("slot_attention", {}, quantized(attention(4, 1, 131_072, queries=32), 4)),
    "segments-8b-8-bits": ("segment_attention", {}, quantized(segments(4, 8, 65_536), 8)),
    "segments-70b-4-bits": ("segment_attention", {}, quantized(segments(8, 1, 262_144), 4)),
    "prompt-8b-32k": ("prompt_attention", {}, attention(4, 1, 32_768, 32_768)),
    "prompt-14b-chunk-after-8k": ("prompt_attention", {"window": 4096}, attention(5, 1, 8192 + 2048, 2048)),
    "window-8b-32-of-128k": ("window_scores", {}, window(4, 32, 131_072)),
    "window-14b-32-of-32k": ("window_scores", {}, window(5, 32, 32_768, lse=False)),
    "window-70b-200-of-2k": (
        "window_scores",
        {"reduction": Reduction("sum", "max", "group"), "causal": False},
        window(8, 200, 2048),
    ),
    "window-8b-last-of-32k": ("window_scores", {}, window(4, 1, 32_768)),
    "window-8b-all-of-8k": ("window_scores", {}, window(4, 8192, 8192)),
    "window-8b-mean-of-32k": ("window_scores", {"reduction": Reduction("mean", "max")}, window(4, 32, 32_768)),
    "decode-2b-2k-softcap": ("slot_attention", {"softcap": 50.0}, attention(2, 8, 2048, head_dim=256)),
    "prompt-2b-4k-softcap": ("prompt_attention", {"softcap": 50.0}, attention(2, 1, 4096, 4096, head_dim=256)),
    "window-2b-32-of-4k-softcap": ("window_scores", {"softcap": 50.0}, window(2, 32, 4096)),
    "top-1k-of-2k": ("top_tokens", {"size": 1024}, scores(8, 2048)),
    "top-2k-of-128k": ("top_tokens", {"size": 2048}, scores(1, 131_072)),
    "top-8k-of-1m": ("top_tokens", {"size": 8192}, scores(1, 1 << 20)),
    "experts-30b-4k": ("grouped_product", {}, experts(32_768, 128, 2048, 768)),
    "experts-47b-64": ("grouped_product", {}, experts(128, 8, 14_336, 4096)),
    "experts-47b-float32": ("grouped_product", {}, experts(4096, 8, 4096, 14_336, jnp.float32)),
}


SMALL = Gpu(
    name="NVIDIA L4",
    capability=(8, 9),
    cores=58,
    fpus_per_core=128,
    shared_memory=102_400,
    l2_cache=50_331_648,
    clock=2.04,
    memory=23_000_000_000,
    bandwidth=300_000_000_000,
)


# Of each operation, a problem that is compiled for all GPUs. The others are compiled for one.
GPUS = ("a100", "h200", "b200")
EVERYWHERE = (
    "decode-8b-2k-extra-25",
    "segments-8b-8-bits",
    "prompt-8b-32k",
    "window-8b-mean-of-32k",
    "top-2k-of-128k",
    "experts-30b-4k",
)
SMALLER = (
    "decode-256-channels",
    "decode-7b-32k-extra-25",
    "prompt-8b-32k",
    "prompt-2b-4k-softcap",
    "window-8b-32-of-128k",
    "top-2k-of-128k",
)
# These differ from another problem in sizes alone, or are compiled for smaller GPUs or with wide offsets below.
ALIKE = {
    "window-2b-32-of-4k-softcap",
    "decode-70b-128k",
    "decode-past-2**31",
    "decode-8b-2k-extra-4",
    "decode-8b-2k-extra-4-8-bits",
    "decode-8b-2k-8-bits",
    "decode-70b-128k-4-bits",
    "segments-70b",
    "top-8k-of-1m",
    *set(SMALLER) - set(EVERYWHERE),
}


@pytest.mark.parametrize(
    ("problem", "name"),
    part(
        product(PROBLEMS, GPUS),
        {
            *((problem, "h200") for problem in PROBLEMS if problem not in ALIKE),
            *product(EVERYWHERE, ["b200"]),
            *((problem, "a100") for problem in EVERYWHERE if problem not in SMALLER),  # the L4 has its tensor cores
        },
        ((problem, "h200") for problem in EVERYWHERE),
    ),
)
def test_compiles(problem: str, name: str, tmp_path: Path) -> None:
    """Spills no register but those of SPILLED. Products run on tensor cores, except in float32."""
    compiles(problem, accelerator(name), tmp_path)


@pytest.mark.parametrize("problem", SMALLER)
def test_compiles_for_gpus_with_100_kb_of_shared_memory(
    problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator("a100")
    monkeypatch.setattr(import_module("kvjax.pallas_kernels.triton.attention"), "small_cores", lambda: True)
    compiles(problem, Target("l4:1", "cuda", SMALL, 1).devices()[0], tmp_path)


def compiles(problem: str, device: jax.Device, tmp_path: Path) -> None:
    tool("ptxas")
    operation, static, shapes = PROBLEMS[problem]
    if operation not in ("top_tokens", "grouped_product"):
        static = static | {"scale": 0.09}
    kernel = getattr(import_module(f"kvjax.pallas_kernels.{operation}.triton"), operation)
    if "asked" in shapes:
        kernel = partial(call_with_extra, kernel)
    kernels = compile_for(device, partial(kernel, **static), shapes, tmp_path)
    assert {kernel.name for kernel in kernels} >= KERNELS[operation]
    for kernel in kernels:
        print(problem, device.device_kind, kernel)
        assert kernel.spilled <= SPILLED.get((problem, device.device_kind), 0), kernel
        if (
            kernel.name in ("attend_kernel", "window_scores_kernel", "grouped_product_kernel")
            and "float32" not in problem
        ):
            assert kernel.products, kernel


def call_with_extra(
    kernel: Any, asked: Any, asked_lse: Any, asked_positions: Any, reduction: Reduction, **options: Any
) -> Any:
    """Calls the kernel with the arrays of `Asked` given one by one."""
    return kernel(**options, asked=Asked(asked, asked_lse, asked_positions, reduction))


@pytest.mark.parametrize(("bits", "most"), [(8, 870), (4, 900)])
def test_loops_over_codes_are_short(bits: int, most: int, tmp_path: Path) -> None:
    """An H100 is bound by the instructions of this loop. They are per thread, for 64 slots by four warps."""
    tool("nvdisasm")
    kernel = import_module("kvjax.pallas_kernels.slot_attention.triton").slot_attention
    compile_for(accelerator("h200"), partial(kernel, scale=0.09), quantized(attention(4, 8, 32_768), bits), tmp_path)
    length = longest_loop(tmp_path, "attend_kernel")
    print(bits, length)
    assert 300 < length <= most


def test_offsets_past_2_to_the_31_are_64_bits_wide(tmp_path: Path) -> None:
    """A batch row of 8 heads, 128K slots and 128 channels has 2**27 elements. 32 rows need 64 bits, 16 rows do not."""
    kernel = import_module("kvjax.pallas_kernels.slot_attention.triton").slot_attention
    for batch, wide in ((32, True), (16, False)):
        folder = tmp_path / str(batch)
        kernels = compile_for(accelerator("h200"), partial(kernel, scale=0.09), attention(4, batch, 131_072), folder)
        assert [kernel.spilled for kernel in kernels if kernel.name == "attend_kernel"] == [0]
        (program,) = [text for path in folder.glob("*with-opt.ll") if "@attend_kernel" in (text := path.read_text())]
        row = re.search(rf"(?:shl|mul)[a-z ]* i64 %\w+, (?:27|{2**27})\b", program)
        assert bool(row) == wide, batch

"""The GPU kernels, interpreted on a CPU, against float64 and against their references."""

from functools import partial
from importlib import import_module
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import QuantizedArray
from kvjax.pallas_kernels.blocks import Blocks
from tests.pallas_kernels.cases import (
    ASKED_CASES,
    PROMPT_CASES,
    QUANTIZED_ASKED_CASES,
    QUANTIZED_CASES,
    QUANTIZED_SEGMENT_CASES,
    SEGMENT_CASES,
    SLOT_CASES,
    WINDOW_CASES,
    Case,
    check_asked,
    check_prompt,
    check_segments,
    check_slots,
    check_window,
    reference_of,
)

attention, slot, segment, window, top, prompt = (
    import_module(f"kvjax.pallas_kernels.{name}")
    for name in (
        "triton_attention",
        "slot_attention.triton",
        "segment_attention.triton",
        "window_scores.triton",
        "top_tokens.triton",
        "prompt_attention.triton",
    )
)


def jitted(kernel, **options):
    """The interpreted kernel under jit, with what must be static given by keyword."""

    def call(*arrays, bias=None, lse=None, asked=None, **static):
        extra = {name: x for name, x in (("bias", bias), ("lse", lse), ("asked", asked)) if x is not None}
        return jax.jit(partial(kernel, interpret=True, **static, **options))(*arrays, **extra)

    return call


@pytest.mark.parametrize("case", SLOT_CASES + QUANTIZED_CASES, ids=str)
def test_slot_attention(case):
    check_slots(jitted(slot.slot_attention), case)


@pytest.mark.parametrize(("case", "count", "reduction"), ASKED_CASES + QUANTIZED_ASKED_CASES)
def test_slot_attention_asks_besides(case, count, reduction):
    check_asked(jitted(slot.slot_attention), case, count, reduction)


@pytest.mark.parametrize(("case", "lanes"), SEGMENT_CASES + QUANTIZED_SEGMENT_CASES, ids=str)
def test_segment_attention(case, lanes):
    check_segments(jitted(segment.segment_attention), case, lanes)


@pytest.mark.parametrize("case", WINDOW_CASES, ids=str)
def test_window_scores(case):
    """With a GPU's tiles where queries are few, and small ones, of which there are several, where they are not."""
    blocks = Blocks(16, 16, warps=1, stages=1) if case.queries >= 20 else None
    check_window(jitted(window.window_scores, blocks=blocks), case)


SPECIAL = [-np.inf, np.inf, -0.0, 0.0, 1.0, -1.0, 1e-30, 3.4e38, -3.4e38]


@pytest.mark.parametrize(("tile", "size"), [(16, 40), (16, 5), (64, 40), (64, 7)])
def test_top_tokens_equals_the_reference(tile, size):
    """One tile and several, of scores with ties, signed zeros and infinities, in rows that are short and empty."""
    kernel = jax.jit(partial(top.top_tokens, size=size, tile=tile, interpret=True))
    reference = jax.jit(partial(reference_of("top_tokens"), size=size))
    rng = np.random.default_rng(tile + size)
    for _ in range(20):
        scores = rng.choice(np.float32([*SPECIAL, *rng.normal(size=7)]), size=(2, 3, 40))
        scores[0, 0] = -np.inf
        scores[0, 1] = scores[0, 1, 0]
        positions = np.stack([rng.permutation(40) for _ in range(6)]).reshape(2, 3, 40)
        counts = rng.integers(0, size + 1, (2, 3))
        np.testing.assert_array_equal(kernel(scores, positions, counts), reference(scores, positions, counts))


@pytest.mark.parametrize(("case", "slots"), PROMPT_CASES, ids=str)
def test_prompt_attention(case, slots):
    check_prompt(jitted(prompt.prompt_attention), case, slots)


@pytest.mark.parametrize("window", [None, 9])
def test_what_cudnn_is_asked(monkeypatch, window):
    """Rows that begin at the left, in the library's terms; what it leaves beyond their ends does not matter."""
    cudnn = import_module("jax._src.cudnn.fused_attention_stablehlo")

    def library(q, k, v, *, q_seqlen, kv_seqlen, scale, mask_type, qkv_layout, sliding_window_length, return_residual):
        assert (mask_type, qkv_layout, return_residual) == (cudnn.MaskType.PADDING_CAUSAL, "BNTH", True)
        np.testing.assert_array_equal(q_seqlen, kv_seqlen)
        t = jnp.where(jnp.arange(q.shape[2]) < q_seqlen[:, None], jnp.arange(q.shape[2]), -1)
        p = jnp.broadcast_to(t[:, None], k.shape[:3])
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        out, lse = reference_of("prompt_attention")(*wide, t, p, scale=scale, window=sliding_window_length)
        beyond = (t < 0)[:, None]
        return jnp.where(beyond[..., None], jnp.nan, out).astype(q.dtype), jnp.where(beyond, jnp.nan, lse)

    monkeypatch.setattr(cudnn, "dot_product_attention", library)
    check_prompt(prompt.prompt_attention, Case(64, 4, 40, 0, "bfloat16", window=window), 0)


def test_without_cudnn_prompts_are_read_by_triton(monkeypatch):
    asked = []

    def missing(*arrays, **options):
        asked.append(options["scale"])
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(prompt, "by_cudnn", missing)
    monkeypatch.setattr(prompt, "attend", lambda *arrays, interpret, **options: asked.append("attend") or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check_prompt(prompt.prompt_attention, Case(64, 4, 40, 0, "bfloat16"), 0)
    assert asked[1:] == ["attend"]


@pytest.mark.parametrize("bound", [1, 64, 65, 200])
def test_tiles_beyond_the_last_occupied_slot_are_not_read(bound):
    """Values that are not numbers spoil all that a tile of them is part of: up to the bound, and nothing after it."""
    rng = np.random.default_rng(bound)
    tile, slots = 32, 256
    q = rng.normal(size=(1, 2, 1, 128)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, 1, slots, 128)).astype(np.float32)
    p = np.where(np.arange(slots) < bound, np.arange(slots), -1)[None, None]
    read = -(-bound // tile) * tile
    assert attention.blocks_for(2, k).slots == tile
    kernel = jax.jit(partial(slot.slot_attention, scale=0.1, interpret=True))
    for first, spoilt in ((read, False), (read - 1, True)):
        values = np.where(np.arange(slots)[:, None] < first, v, np.nan)
        out, *_ = kernel(q, k, values, np.full((1, 1), slots), p)
        assert np.isnan(out).all() == spoilt == np.isnan(out).any()


@pytest.mark.parametrize(
    ("capability", "reason"), [("7.5", r"compute capability 7\.5; 8\.0 or more"), ("gfx942", "gfx942; NVIDIA's")]
)
def test_gpus_that_they_are_not_for(monkeypatch, capability, reason):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    q, t = jnp.zeros((1, 1, 1, 8)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match=reason):
        slot.slot_attention(q, q, q, t, t[None], scale=1.0)
    with pytest.raises(NotImplementedError, match=reason):
        top.top_tokens(jnp.zeros((1, 1, 4)), jnp.arange(4)[None, None], jnp.ones((1, 1), jnp.int32), size=2)


@pytest.mark.parametrize(
    ("dtypes", "channels", "reason"),
    [
        (("float32", "bfloat16"), 8, "dtypes bfloat16, float32; one of"),
        (("int8", "int8"), 8, "dtypes int8; one of"),
        (("float32", "float32"), 264, "heads of 264 channels; at most 256"),
    ],
)
def test_arguments_that_they_do_not_take(dtypes, channels, reason):
    q, k = (jnp.zeros((1, 1, 1, channels), dtype) for dtype in dtypes)
    t = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match=reason):
        slot.slot_attention(q, k, k, t, t[None], scale=1.0)
    with pytest.raises(NotImplementedError, match="not plain arrays"):
        segment.segment_attention(q, [k], [k], t, t[None], t, t, scale=1.0)


@pytest.mark.parametrize(("bits", "channels", "least"), [(8, 96, 16), (8, 8, 16), (4, 16, 32)])
def test_codes_of_which_no_tile_can_be_made(bits, channels, least):
    q, t = jnp.zeros((1, 1, 1, channels)), jnp.zeros((1, 1), jnp.int32)
    k = QuantizedArray.of(q, bits, channels)
    with pytest.raises(NotImplementedError, match=f"{channels} channels in {bits} bits; powers of two from {least} on"):
        slot.slot_attention(q, k, k, t, t[None], scale=1.0)
    with pytest.raises(NotImplementedError, match="not plain arrays"):
        window.window_scores(q, k, t, t[None], scale=1.0)

"""The TPU kernels, interpreted on a CPU, against float64."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import QuantizedArray, Reduction
from tests.dense import assert_close, attention, context, left_padded
from tests.pallas_kernels.cases import (
    EXTRA_CASES,
    PROMPT_CASES,
    QUANTIZED_CASES,
    QUANTIZED_EXTRA_CASES,
    QUANTIZED_SEGMENT_CASES,
    SEGMENT_CASES,
    SLOT_CASES,
    TOLERANCE,
    WINDOW_CASES,
    Case,
)
from tests.pallas_kernels.checks import (
    check_extra,
    check_prompt,
    check_segments,
    check_slots,
    check_window,
    jitted,
)
from tests.products import part

prompt, slot, segment, window, top = (
    import_module(f"kvjax.pallas_kernels.{name}.mosaic_tpu")
    for name in ("prompt_attention", "slot_attention", "segment_attention", "window_scores", "top_tokens")
)
mosaic, decode = (import_module(f"kvjax.pallas_kernels.{name}") for name in ("mosaic_tpu.common", "mosaic_tpu.decode"))
by_position, parts = (
    import_module(f"kvjax.pallas_kernels.prompt_attention.{name}") for name in ("mosaic_by_position", "parts")
)


interpreted = partial(jitted, interpret=True)


@pytest.fixture
def small_tiles(monkeypatch):
    """Small tiles, so that small problems have several."""
    monkeypatch.setattr(mosaic, "TILE_BYTES", 1)
    monkeypatch.setattr(window, "TILE_BYTES", 1 << 16)
    monkeypatch.setattr(window, "BLOCK_Q", 128)


def without_float16(case, check, kernel):
    """Returns the case, in float32 if it is in float16. The kernel must refuse float16."""
    if case.dtype != "float16":
        return case
    with pytest.raises(NotImplementedError, match="dtypes float16"):
        check(interpreted(kernel), case)
    return replace(case, dtype="float32")


@pytest.mark.long(first=1)
@pytest.mark.slow(first=6)
@pytest.mark.parametrize("case", SLOT_CASES + QUANTIZED_CASES, ids=str)
def test_slot_attention(case, small_tiles):
    check_slots(
        interpreted(slot.slot_attention), without_float16(case, check_slots, slot.slot_attention), rounded=False
    )


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("case", "count", "reduction"), EXTRA_CASES + QUANTIZED_EXTRA_CASES)
def test_extra_query_rows(case, count, reduction, small_tiles):
    check_extra(interpreted(slot.slot_attention), case, count, reduction)


SEGMENT_EXTRA = [
    None,
    (4, Reduction("sum", "sum", "group")),
    (7, Reduction("max", "mean", "group")),
    (4, Reduction("max", "max", "group")),
]


@pytest.mark.long(first=1)
@pytest.mark.parametrize(
    ("case", "lanes", "extra"),
    [(*case, extra) for case, extra in zip(SEGMENT_CASES, SEGMENT_EXTRA, strict=True)],
    ids=str,
)
def test_segment_attention(case, lanes, extra, small_tiles):
    check_segments(interpreted(segment.segment_attention), case, lanes, extra=extra)


def test_more_tiles_than_scalar_memory_holds_numbers_for_are_refused(small_tiles):
    """131,072 slots of 512 heads, in tiles of four parts of 128."""
    shapes = [(64, 8, 1, 128), (64, 8, 131_072, 128), (64, 8, 131_072, 128)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    positions = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((64, 1), (64, 8, 131_072))]
    with pytest.raises(NotImplementedError, match="131072 tiles: expected at most 21333 for 512 heads"):
        jax.eval_shape(partial(slot.slot_attention, scale=1.0), *arrays, *positions)


def test_scores_of_more_queries_than_the_memory_holds_are_refused():
    """128 query heads of DeepSeek-V2 share a key of 576 channels. A tile would have 256 queries of each."""
    q, k = (jax.ShapeDtypeStruct((1, *shape, 576), jnp.bfloat16) for shape in ((128, 300), (1, 300)))
    t, p = (jax.ShapeDtypeStruct((1, *shape), jnp.int32) for shape in ((300,), (1, 300)))
    with pytest.raises(NotImplementedError, match="41,943,040 bytes of queries per tile: expected at most 12,582,912"):
        jax.eval_shape(partial(window.window_scores, scale=1.0), q, k, t, p)


@pytest.mark.slow
def test_two_cores_share_the_heads(small_tiles, monkeypatch):
    """Cores have different numbers of steps. With one lane per batch row, neighbouring heads share its tiles."""
    monkeypatch.setattr(decode, "chip", lambda: mosaic.Chip(tile_bytes=1, cores=2))
    check_slots(interpreted(slot.slot_attention), Case(128, 4, 1, 600, received="sum"), rounded=False)
    check_segments(interpreted(segment.segment_attention), Case(128, 2, 1, 0), 2, extra=SEGMENT_EXTRA[1])
    check_extra(interpreted(slot.slot_attention), Case(64, 4, 1, 600), 4, Reduction("sum", "sum", "group"))


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("case", "lanes"), QUANTIZED_SEGMENT_CASES, ids=str)
def test_quantized_segments(case, lanes, small_tiles):
    check_segments(interpreted(segment.segment_attention), case, lanes, rounded=False)


@pytest.mark.slow
def test_keys_and_values_of_different_storage_are_refused():
    t = np.zeros((1, 1), np.int32)

    def attend(channels, bits, *per_scale):
        q = np.zeros((1, 1, 1, channels), np.float32)
        k, v = (QuantizedArray.of(q, bits, group) for group in per_scale)
        return slot.slot_attention(q, k, v, t, t[None], scale=1.0)

    with pytest.raises(NotImplementedError, match="expected the same storage"):
        jax.eval_shape(lambda: attend(128, 8, 32, 64))
    with pytest.raises(NotImplementedError, match="3 scales for two halves"):
        jax.eval_shape(lambda: attend(96, 4, 32, 32))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("case", WINDOW_CASES, ids=str)
def test_window_scores(case, small_tiles):
    check_window(interpreted(window.window_scores), without_float16(case, check_window, window.window_scores))


@pytest.mark.slow
def test_slots_beyond_the_last_visible_tile_are_not_read(small_tiles):
    """Each head has 5 tiles. NaN in the tiles after the last visible one does not change the result."""
    rng = np.random.default_rng(0)
    bounds = np.array([[0, 1, 128, 129], [600, 300, 0, 512]])
    q = rng.normal(size=(2, 8, 1, 64)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 4, 600, 64)).astype(np.float32)
    at = np.arange(600)
    positions = np.where(at < bounds[..., None], at, -1)
    attend = jax.jit(partial(slot.slot_attention, scale=0.1, interpret=True))
    t = np.full((2, 1), 700)
    clean = attend(q, k, v, t, positions)
    beyond = (at >= -(-bounds[..., None] // 128) * 128)[..., None]
    k, v = (np.where(beyond, np.float32(np.nan), x) for x in (k, v))
    for x, y in zip(clean[:2], attend(q, k, v, t, positions)[:2], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("tokens", "size"), [(17, 5), (300, 300), (2100, 130), (16_500, 700)])
def test_top_tokens_equal_a_stable_sort(tokens, size):
    """Heads have ordinary scores, many ties, no score above -inf, or all scores wanted. Positions have any order."""
    rng = np.random.default_rng(tokens)
    scores = rng.normal(size=(2, 4, tokens)).astype(np.float32)
    scores[0, 1] = rng.integers(-1, 2, tokens) * 0.0  # 0.0 and -0.0 are equal
    scores[1, 1] = rng.integers(-2, 3, tokens)
    scores[:, 2] = -np.inf
    scores[1, 2, :3] = np.inf, -3.4e38, 1e-30
    scores[1, 0, rng.permutation(tokens)[: tokens // 2]] = -np.inf
    positions = np.stack([rng.permutation(tokens) for _ in range(8)]).reshape(2, 4, tokens)
    counts = rng.integers(1, size + 1, (2, 4))
    counts[0, 3], counts[1, 3] = size, 0
    got = np.asarray(jax.jit(partial(top.top_tokens, size=size, interpret=True))(scores, positions, counts))
    assert got.shape == (2, 4, size)
    for b, h in np.ndindex(2, 4):
        eligible = np.flatnonzero(scores[b, h] > -np.inf)
        order = eligible[np.lexsort((positions[b, h, eligible], -scores[b, h, eligible]))]
        expected = np.sort(order[: counts[b, h]])
        np.testing.assert_array_equal(got[b, h], np.pad(expected, (0, size - expected.size), constant_values=-1))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("dtype", "group", "window"), [("float32", 7, None), ("float32", 1, 30), ("bfloat16", 2, None)]
)
def test_prompt_attention(dtype, group, window):
    """Rows are full, padded on the left, and without tokens. N is more than a tile and no multiple of it."""
    rng = np.random.default_rng(group)
    N = 150
    q = rng.normal(size=(3, 2 * group, N, 64)).astype(dtype)
    k, v = rng.normal(size=(2, 3, 2, N, 64)).astype(dtype)
    t = left_padded([N, 70, 0], N, [5, 0, 9])
    p = np.broadcast_to(t[:, None], (3, 2, N))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt, "splash_block", lambda q: 128)
        out, lse = interpreted(prompt.prompt_attention, scale=0.25, window=window)(q, k, v, t, p)
    weights, expected_lse, _ = attention(q, k, t, p, 0.25, window)
    assert (out.dtype, lse.dtype) == (q.dtype, jnp.float32)
    assert_close(out, context(weights, v), *TOLERANCE[dtype])
    assert_close(lse, expected_lse)
    assert not np.any(out[2])


@pytest.mark.parametrize(("case", "slots"), PROMPT_CASES, ids=str)
def test_prompts_over_cached_slots(case, slots, monkeypatch):
    """Cached slots and biases, with several blocks of queries and tiles of keys."""
    monkeypatch.setattr(by_position, "BLOCK_ROWS", 1)
    monkeypatch.setattr(by_position, "MOST_TILE_KEYS", 128)
    check_prompt(interpreted(prompt.prompt_attention), case, slots)


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "block"),
    [
        (16, 128, "bfloat16", (16, 128)),
        (16, 256, "bfloat16", (8, 128)),
        (71, 64, "bfloat16", (1, 384)),
        (128, 576, "bfloat16", (2, 128)),
    ],
)
def test_query_heads_that_do_not_fit_one_block_have_several(group, head_dim, dtype, block):
    """Those of a latent, which are many, of many channels. Every block is within the limits of rows and bytes."""
    q, k = (jax.ShapeDtypeStruct((2, n, size, head_dim), dtype) for n, size in ((group, 384), (1, 400)))
    t, p = (jax.ShapeDtypeStruct((2, *shape), jnp.int32) for shape in ((384,), (1, 400)))
    jaxpr = jax.make_jaxpr(partial(by_position.by_position, scale=1.0, interpret=True))(q, k, k, t, p)
    (call,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call")
    assert call.params["grid_mapping"].block_mappings[0].ref_aval.shape == (*block, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "slots"), part([x for x in PROMPT_CASES if x[1] and not x[0].bias], PROMPT_CASES[1:2])
)
def test_prompts_by_splash_attention_and_cached_slots_by_position(case, slots, monkeypatch):
    """In float32. Splash attention scales queries in their own dtype, as XLA does."""
    case = replace(case, dtype="float32")
    monkeypatch.setattr(parts, "LEAST_TOKENS", 16)
    monkeypatch.setattr(by_position, "MOST_TILE_KEYS", 128)
    check_prompt(interpreted(prompt.prompt_attention), case, slots)


@pytest.mark.parametrize(
    ("tokens", "channels", "dtype", "block"),
    [
        (100, 128, "bfloat16", 128),
        (1024, 128, "bfloat16", 512),
        (1025, 256, "bfloat16", 1024),
        (1 << 17, 128, "float32", 1024),
        (1 << 17, 256, "float32", 512),
    ],
)
def test_blocks_of_splash_attention_grow_with_the_prompt(tokens, channels, dtype, block):
    assert prompt.splash_block(jax.ShapeDtypeStruct((1, 8, tokens, channels), dtype)) == block

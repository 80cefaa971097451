"""The Triton kernels against float64: compiled on a GPU, interpreted elsewhere."""

from functools import partial
from importlib import import_module
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kvjax.pallas_kernels import QuantizedArray, Reduction
from kvjax.pallas_kernels.triton.blocks import Blocks
from tests.dense import assert_close, context
from tests.dense import attention as dense_attention
from tests.pallas_kernels.cases import (
    EXTRA_CASES,
    PROMPT_CASES,
    QUANTIZED_CASES,
    QUANTIZED_EXTRA_CASES,
    QUANTIZED_SEGMENT_CASES,
    SEGMENT_CASES,
    SLOT_CASES,
    THIN_CASES,
    WINDOW_CASES,
)
from tests.pallas_kernels.checks import (
    check_extra,
    check_prompt,
    check_segments,
    check_slots,
    check_window,
    jitted,
    on_gpu,
    reference_of,
)
from tests.products import part

attention, attention_kernel, slot, segment, window, top, prompt = (
    import_module(f"kvjax.pallas_kernels.{name}")
    for name in (
        "triton.attention",
        "triton.attention_kernel",
        "slot_attention.triton",
        "segment_attention.triton",
        "window_scores.triton",
        "top_tokens.triton",
        "prompt_attention.triton",
    )
)

INTERPRET = not on_gpu()
here = partial(jitted, interpret=INTERPRET)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("case", SLOT_CASES + QUANTIZED_CASES + THIN_CASES, ids=str)
def test_slot_attention(case):
    check_slots(here(slot.slot_attention), case, rounded=False)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("case", "count", "reduction"), EXTRA_CASES + QUANTIZED_EXTRA_CASES)
def test_extra_query_rows(case, count, reduction):
    check_extra(here(slot.slot_attention), case, count, reduction)


SEGMENT_EXTRA = [None, (4, Reduction("sum", "sum", "group")), (7, Reduction("max", "mean", "group"))]


@pytest.mark.long(first=1)
@pytest.mark.slow(first=4)
@pytest.mark.parametrize(
    ("case", "lanes", "extra"),
    [
        (
            *case,
            SEGMENT_EXTRA[i % 3],
        )  # rows of seven query heads of 128 channels in float32 are more than one pass holds
        for cases in (SEGMENT_CASES, QUANTIZED_SEGMENT_CASES)
        for i, case in enumerate(cases)
    ],
    ids=str,
)
def test_segment_attention(case, lanes, extra):
    # Beside extra rows, entries are dequantised. Without, codes in bfloat16 are multiplied as they are.
    check_segments(here(segment.segment_attention), case, lanes, rounded=extra is not None, extra=extra)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("case", WINDOW_CASES, ids=str)
def test_window_scores(case, monkeypatch):
    """Few queries use the tile sizes of a GPU. Many queries use small tiles, so that there are several."""
    if case.queries >= 20:
        monkeypatch.setattr(window, "score_blocks", lambda *_, **__: Blocks(16, 16, warps=1, stages=1))
    check_window(here(window.window_scores), case)


SPECIAL = [-np.inf, np.inf, -0.0, 0.0, 1.0, -1.0, 1e-30, 3.4e38, -3.4e38]


@pytest.mark.parametrize(("tile", "size"), [(16, 40), (16, 5), (64, 40), (64, 7)])
def test_top_tokens_equals_the_reference(tile, size, monkeypatch):
    """One tile and several. Scores have ties, signed zeros and infinities; some heads have none that may be chosen."""
    monkeypatch.setattr(top, "TILE", tile)
    kernel = jax.jit(partial(top.top_tokens, size=size, interpret=INTERPRET))
    reference = jax.jit(partial(reference_of("top_tokens"), size=size))
    rng = np.random.default_rng(tile + size)
    for _ in range(20):
        scores = rng.choice(np.float32([*SPECIAL, *rng.normal(size=7)]), size=(2, 3, 40))
        scores[0, 0] = -np.inf
        scores[0, 1] = scores[0, 1, 0]
        positions = np.stack([rng.permutation(40) for _ in range(6)]).reshape(2, 3, 40)
        counts = rng.integers(0, size + 1, (2, 3))
        np.testing.assert_array_equal(kernel(scores, positions, counts), reference(scores, positions, counts))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("case", "slots"), PROMPT_CASES, ids=str)
def test_prompt_attention(case, slots):
    check_prompt(here(prompt.prompt_attention), case, slots)


def programs_of(function, *arrays):
    """The grid of the first Pallas kernel that a function calls: splits, blocks of rows, heads, batch rows."""
    jaxpr = jax.make_jaxpr(function)(*arrays)
    return next(eqn.params["grid_mapping"].grid for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call")


@pytest.mark.long(first=1)
@pytest.mark.parametrize(
    ("splits", "window"),
    part(product([8, 16, 32, 64], [None, 100]), {*product([8, 16, 32, 64], [None]), (16, 100)}),
)
def test_splits(splits, window):
    """Programs share the occupied tiles of a head: all, few, one, none. Few slots have most of the weight."""
    rng = np.random.default_rng(splits)
    blocks, slots = Blocks(16, 16, warps=1, stages=1), 32 * splits
    used = np.array([[slots, slots // 2 + 3], [17, 0]])
    q = (8 * rng.normal(size=(2, 2, 3, 16))).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 2, slots, 16)).astype(np.float32)
    p = np.stack([rng.permutation(slots) for _ in range(4)]).reshape(2, 2, slots).astype(np.int32)
    p = np.where(np.arange(slots) < used[:, :, None], p, -1)
    t = np.array([[slots], [slots // 2]], np.int32)
    attend = partial(attention.attend, scale=0.25, window=window, blocks=blocks, interpret=INTERPRET)
    assert programs_of(attend, q, k, v, t, p, used) == (splits, 1, 2, 2)
    results = jax.jit(attend)(q, k, v, t, p, used)
    rows = q.reshape(2, 6, 1, 16)
    weights, lse, _ = dense_attention(rows, k, t, p, 0.25, window)
    assert lse[0].min() > 8
    assert np.isneginf(lse[1, 3:]).all()
    assert_close(results.out.reshape(2, 6, 1, 16), context(weights, v))
    assert_close(results.lse.reshape(2, 6, 1), lse)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("scanned", [8, 64])  # less than a tile, and four tiles
def test_a_program_finds_its_last_occupied_tile(splits, scanned, monkeypatch):
    monkeypatch.setattr(attention_kernel, "SCANNED", scanned)
    tile, slots, rng = 16, 500, np.random.default_rng(splits)
    bounds = [*range(0, 66), 470, 499, 500]
    occupied = (np.arange(slots) < np.array(bounds)[:, None]) & (rng.random((len(bounds), slots)) < 0.5)

    def find(p_ref, found_ref):
        for split in range(splits):
            found_ref[split] = attention_kernel.occupied_tiles(p_ref, tile, split, splits)

    count = jax.vmap(pl.pallas_call(find, jax.ShapeDtypeStruct((splits,), jnp.int32), interpret=True))
    tiles = np.pad(occupied, ((0, 0), (0, 12))).reshape(len(bounds), -1, tile).any(axis=2)
    for split in range(splits):
        own = tiles[:, split::splits]
        expected = np.where(own, np.arange(1, own.shape[1] + 1), 0).max(axis=1)
        np.testing.assert_array_equal(count(np.where(occupied, 7, -1))[:, split], expected)


@pytest.mark.parametrize(
    ("batch", "group", "slots", "programs"),
    [(1, 4, 2048, 128), (1, 8, 131_072, 264), (8, 4, 2048, 256), (64, 4, 2048, 512), (1, 4, 128, 8), (1, 4, 64, 8)],
)
def test_programs_are_enough_for_a_gpu(monkeypatch, batch, group, slots, programs):
    """Two programs per core of an H100, of two tiles each at least. Heads of 128 channels have tiles of 64 slots."""
    monkeypatch.setattr(attention, "measured", lambda work: None)
    q, k = (
        jax.ShapeDtypeStruct((batch, heads, size, 128), jnp.bfloat16) for heads, size in ((8 * group, 1), (8, slots))
    )
    t, p = jax.ShapeDtypeStruct((batch, 1), jnp.int32), jax.ShapeDtypeStruct((batch, 8, slots), jnp.int32)
    call = partial(slot.slot_attention, scale=1.0, interpret=INTERPRET)
    assert np.prod(programs_of(call, q, k, k, t, p)) == programs


@pytest.mark.parametrize("bound", [1, 64, 65, 200])
def test_tiles_beyond_the_last_occupied_slot_are_not_read(bound):
    """NaN values in the last tile that is read make the context NaN. NaN values after it do not."""
    rng = np.random.default_rng(bound)
    tile, slots = 32, 256
    q = rng.normal(size=(1, 2, 1, 128)).astype(np.float32)
    k, v = rng.normal(size=(2, 1, 1, slots, 128)).astype(np.float32)
    p = np.where(np.arange(slots) < bound, np.arange(slots), -1)[None, None]
    read = -(-bound // tile) * tile
    assert attention.attend_blocks(2, k).slots == tile
    kernel = jax.jit(partial(slot.slot_attention, scale=0.1, interpret=INTERPRET))
    for first, is_nan in ((read, False), (read - 1, True)):
        values = np.where(np.arange(slots)[:, None] < first, v, np.nan)
        out, *_ = kernel(q, k, values, np.full((1, 1), slots), p)
        assert np.isnan(out).all() == is_nan == np.isnan(out).any()


@pytest.mark.parametrize(
    ("capability", "reason"),
    [("7.5", r"compute capability 7\.5: expected 8\.0 or more"), ("gfx942", "gfx942: expected an NVIDIA GPU")],
)
def test_other_gpus_are_refused(monkeypatch, capability, reason):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    q, t = jnp.zeros((1, 1, 1, 8)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match=reason):
        slot.slot_attention(q, q, q, t, t[None], scale=1.0)
    with pytest.raises(NotImplementedError, match=reason):
        top.top_tokens(jnp.zeros((1, 1, 4)), jnp.arange(4)[None, None], jnp.ones((1, 1), jnp.int32), size=2)


@pytest.mark.parametrize(
    ("dtypes", "channels", "reason"),
    [
        (("float32", "bfloat16"), 8, "dtypes bfloat16, float32: expected one of"),
        (("int8", "int8"), 8, "dtypes int8: expected one of"),
        (("float32", "float32"), 264, "heads of 264 channels: expected at most 256"),
    ],
)
def test_other_arguments_are_refused(dtypes, channels, reason):
    q, k = (jnp.zeros((1, 1, 1, channels), dtype) for dtype in dtypes)
    t = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(NotImplementedError, match=reason):
        slot.slot_attention(q, k, k, t, t[None], scale=1.0)
    with pytest.raises(NotImplementedError, match="values of type list: expected plain arrays"):
        segment.segment_attention(q, [k], [k], t, t[None], t, t, scale=1.0)


@pytest.mark.parametrize(("bits", "channels", "least"), [(8, 96, 16), (8, 8, 16), (4, 16, 32)])
def test_codes_that_do_not_fill_a_tile_are_refused(bits, channels, least):
    q, t = np.zeros((1, 1, 1, channels), np.float32), np.zeros((1, 1), np.int32)
    k = jax.eval_shape(lambda: QuantizedArray.of(q, bits, channels))
    with pytest.raises(
        NotImplementedError, match=f"{channels} channels in {bits} bits: expected a power of two >= {least}"
    ):
        slot.slot_attention(q, k, k, t, t[None], scale=1.0)
    with pytest.raises(NotImplementedError, match="QuantizedArray: expected plain arrays"):
        window.window_scores(q, k, t, t[None], scale=1.0)

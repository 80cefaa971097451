"""The TPU kernels, compiled for absent TPUs: Mosaic accepts them, they fit the chip, and no operand is copied."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

import kvjax
from benchmarks.aot.hlo import Instruction, Loop
from benchmarks.aot.lower import lower_decode
from benchmarks.aot.targets import target
from kvjax.pallas_kernels import Asked, QuantizedArray, Reduction
from tests.pallas_kernels import cases
from tests.products import part
from tests.tiny import decoder

pytestmark = pytest.mark.aot

prompt, slot, segment, window, top = (
    import_module(f"kvjax.pallas_kernels.{name}.mosaic_tpu")
    for name in ("prompt_attention", "slot_attention", "segment_attention", "window_scores", "top_tokens")
)
mosaic = import_module("kvjax.pallas_kernels.mosaic_tpu.common")
by_position, parts = (
    import_module(f"kvjax.pallas_kernels.prompt_attention.{name}") for name in ("mosaic_by_position", "parts")
)
CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
HEADS = {"8B": (32, 8), "14B": (40, 8), "70B": (64, 8)}
D = 128
SUMS, MAXIMA = (Reduction(rows, "sum", "group") for rows in ("sum", "max"))


def ahead(name: str, kernel, *shapes):
    """Compiles the kernel for one chip, given the (shape, dtype) of each array."""
    try:
        device = target(name).devices()[0]
    except ImportError as error:
        pytest.skip(str(error))
    where = SingleDeviceSharding(device)
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in shapes]
    with jax.sharding.use_abstract_mesh(Mesh(np.array([device]), ("chip",)).abstract_mesh):
        return jax.jit(kernel).trace(*arrays).lower(lowering_platforms=("tpu",)).compile()


def slots(name, batch, heads, length, queries=1, head_dim=D, dtype=jnp.bfloat16, **options):
    Hq, H = heads
    entries = ((batch, H, length, head_dim), dtype)
    q, t, p = ((batch, Hq, queries, head_dim), dtype), ((batch, queries), jnp.int32), ((batch, H, length), jnp.int32)
    return ahead(name, partial(slot.slot_attention, scale=0.1, **options), q, entries, entries, t, p)


def with_extra(name, batch, heads, length, extra, reduction=SUMS, **options):
    """Slot attention with extra query rows, as MorphKV uses them in a decode step."""
    Hq, H = heads
    entries, rows = ((batch, H, length, D), jnp.bfloat16), (batch, Hq, extra)
    q, t, p = ((batch, Hq, 1, D), jnp.bfloat16), ((batch, 1), jnp.int32), ((batch, H, length), jnp.int32)
    asked = ((*rows, D), jnp.bfloat16), (rows, jnp.float32), ((batch, extra), jnp.int32)

    def kernel(q, k, v, t, p, queries, lse, at):
        rows = Asked(queries, lse, at, reduction)
        return slot.slot_attention(q, k, v, t, p, scale=0.1, received="sum", asked=rows, **options)

    return ahead(name, kernel, q, entries, entries, t, p, *asked)


def scores(name, batch, heads, length, queries, head_dim=D, lse=True, **options):
    Hq, H = heads
    q, k = ((batch, Hq, queries, head_dim), jnp.bfloat16), ((batch, H, length, head_dim), jnp.bfloat16)
    t, p = ((batch, queries), jnp.int32), ((batch, H, length), jnp.int32)

    def kernel(q, k, t, p, sums=None):
        return window.window_scores(q, k, t, p, scale=0.1, lse=sums, **options)

    return ahead(name, kernel, q, k, t, p, *([((batch, Hq, queries), jnp.float32)] if lse else []))


def later_chunk(name, heads, queries, cached, head_dim=D, dtype=jnp.bfloat16, biased=False, **options):
    """Prompt attention of a chunk after cached entries. A long one is appended here, as a cache appends it."""
    Hq, H = heads
    M = cached + queries
    long = queries >= parts.LEAST_TOKENS
    k, new = (((1, H, length, head_dim), dtype) for length in (cached if long else M, queries))
    at = [((1, queries), jnp.int32), ((1, H, M), jnp.int32)]
    more = [new, new] if long else [((1, H, M), jnp.float32)] if biased else []

    def kernel(q, k, v, t, p, *more):
        bias = None
        if long:
            k, v = (jnp.concatenate(pair, axis=2) for pair in zip((k, v), more, strict=True))
        elif biased:
            (bias,) = more
        return prompt.prompt_attention(q, k, v, t, p, scale=0.1, bias=bias, **options)

    return ahead(name, kernel, ((1, Hq, queries, head_dim), dtype), k, k, *at, *more)


def written(compiled, nbytes: int) -> list[str]:
    """Kinds of the instructions that write at least `nbytes` to main memory."""
    kinds = []
    for line in compiled.as_text().splitlines():
        instruction = Instruction.read(line)
        if instruction is None or instruction.kind in ("parameter", "bitcast", "get-tuple-element", "tuple"):
            continue
        kinds += [instruction.kind for size, main in instruction.results if main and size >= nbytes]
    return kinds


@pytest.mark.parametrize(
    ("chip", "model", "length"),
    part(
        product(CHIPS, HEADS, [2048 + 64, 131_072]),
        [("v5e:2x2", "70B", 131_072), ("v5p:2x2x1", "14B", 2048 + 64), ("v6e:2x2", "8B", 131_072)],
        [("v6e:2x2", "8B", 131_072)],
    ),
)
def test_attention_while_decoding(chip, model, length):
    """One query over slots, with what slots receive, and one query over segments of a pool of the same size."""
    batch = 8 if length < 100_000 else 1
    Hq, H = HEADS[model]
    compiled = slots(chip, batch, HEADS[model], length, received="max", window=4096)
    assert compiled.as_text().count("tpu_custom_call") >= 1
    assert written(compiled, batch * H * length * D * 2) == []
    assert written(compiled, 1)  # the check sees smaller writes
    for lanes in (1, H):
        rows = H // lanes * length
        pool, p = ((batch, lanes, rows, D), jnp.bfloat16), ((batch, lanes, rows), jnp.int32)
        q, t, head = ((batch, Hq, 1, D), jnp.bfloat16), ((batch, 1), jnp.int32), ((batch, H), jnp.int32)
        kernel = partial(segment.segment_attention, scale=0.1)
        compiled = ahead(chip, kernel, q, pool, pool, t, p, head, head)
        assert written(compiled, batch * lanes * rows * 4) == []  # not even positions


@pytest.mark.parametrize(
    ("chip", "length", "bits"),
    part(product(CHIPS, [2048 + 64, 131_072], [8, 4]), [("v5e:2x2", 2048 + 64, 4), ("v6e:2x2", 131_072, 8)]),
)
def test_attention_to_quantised_entries(chip, length, bits):
    """In slots and segments. No array of codes is written."""
    batch = 8 if length < 100_000 else 1
    Hq, H = HEADS["8B"]

    def compiled(kernel, head_dim, lanes, rows, *others):
        """Compiles with quantised keys and values [batch, lanes, rows, head_dim], and int32 arrays of other shapes."""
        codes = (batch, lanes, rows, head_dim * bits // 8), jnp.int8
        scales = (batch, lanes, rows, head_dim // 32), jnp.bfloat16
        ints = [(shape, jnp.int32) for shape in ((batch, 1), (batch, lanes, rows), *others)]

        def call(q, k, k_scales, v, v_scales, *ints):
            stored = (QuantizedArray(x, y, bits, jnp.dtype(q.dtype)) for x, y in ((k, k_scales), (v, v_scales)))
            return kernel(q, *stored, *ints, scale=0.1)

        query = (batch, Hq, 1, head_dim), jnp.bfloat16
        program = ahead(chip, call, query, codes, scales, codes, scales, *ints)
        assert program.as_text().count("tpu_custom_call") >= 1
        assert written(program, batch * lanes * rows * head_dim * bits // 8) == []

    for head_dim in {D, 64, 8 * D // bits} if bits == 8 else {D, 8 * D // bits}:
        compiled(partial(slot.slot_attention, received="max", window=4096), head_dim, H, length)
        for lanes in (1, H):
            compiled(segment.segment_attention, head_dim, lanes, H // lanes * length, (batch, H), (batch, H))


EXTRA = {"8B-4": ("8B", 4, SUMS), "8B-25": ("8B", 25, SUMS), "14B-25": ("14B", 25, MAXIMA), "8B-max": ("8B", 4, MAXIMA)}


@pytest.mark.parametrize(
    ("chip", "length", "rows"),
    part(
        product(CHIPS, [2048 + 64, 131_072], EXTRA),
        {*product(["v5e:2x2"], [131_072], ["8B-25", "14B-25"]), *product(["v6e:2x2"], [2048 + 64], ["8B-4", "8B-max"])},
    ),
)
def test_extra_query_rows(chip, length, rows):
    """One pass over the keys serves attention and the extra rows of MorphKV, for windows of 32 and 200."""
    batch = 8 if length < 100_000 else 1
    model, extra, reduction = EXTRA[rows]
    compiled = with_extra(chip, batch, HEADS[model], length, extra, reduction)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert written(compiled, batch * HEADS[model][1] * length * D * 2) == []
    # The same over a pool whose heads share a lane; the logits are written as well.
    Hq, H = HEADS[model]
    pool, p = ((batch, 1, H * length, D), jnp.bfloat16), ((batch, 1, H * length), jnp.int32)
    q, t, head = ((batch, Hq, 1, D), jnp.bfloat16), ((batch, 1), jnp.int32), ((batch, H), jnp.int32)
    asked = ((batch, Hq, extra, D), jnp.bfloat16), ((batch, Hq, extra), jnp.float32), ((batch, extra), jnp.int32)

    def kernel(q, k, v, t, p, start, used, queries, lse, at):
        rows = Asked(queries, lse, at, reduction)
        return segment.segment_attention(q, k, v, t, p, start, used, scale=0.1, logits=True, asked=rows)

    compiled = ahead(chip, kernel, q, pool, pool, t, p, head, head, *asked)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert written(compiled, batch * H * length * D * 2) == []


@pytest.mark.parametrize(
    ("chip", "model", "length"),
    part(
        product(CHIPS, HEADS, [2048, 131_072]),
        [("v5e:2x2", "70B", 131_072), ("v6e:2x2", "8B", 2048)],
        [("v6e:2x2", "8B", 2048)],
    ),
)
def test_prefill(chip, model, length):
    """Prompt attention, scores of a window and of all queries, and top-k."""
    Hq, H = HEADS[model]
    q, k, at = ((1, Hq, length, D), jnp.bfloat16), ((1, H, length, D), jnp.bfloat16), ((1, length), jnp.int32)
    ahead(chip, partial(prompt.prompt_attention, scale=0.1), q, k, k, at, ((1, H, length), jnp.int32))
    compiled = later_chunk(chip, HEADS[model], 256, length)
    assert written(compiled, H * (length + 256) * D * 2) == []
    for queries in (32, length):
        compiled = scores(chip, 1, HEADS[model], length, queries)
        assert written(compiled, length * queries * 4 * Hq) == []
    x, count = ((1, H, length), jnp.float32), ((1, H), jnp.int32)
    ahead(chip, partial(top.top_tokens, size=2048), x, ((1, H, length), jnp.int32), count)


@pytest.mark.parametrize(
    ("chip", "head_dim"),
    part(product(CHIPS, [64, 96, 256]), [("v5e:2x2", 96), ("v5e:2x2", 256)]),  # 64 and 96 leave lanes empty
)
def test_other_head_sizes(chip, head_dim):
    length = 8192
    compiled = slots(chip, 1, (32, 8), length, head_dim=head_dim)
    assert written(compiled, 8 * length * head_dim * 2) == []
    compiled = scores(chip, 1, (32, 8), length, 32, head_dim=head_dim)
    assert written(compiled, 8 * length * head_dim * 2) == []
    length = 65_536  # whose keys are larger than what 1,024 queries give
    compiled = later_chunk(chip, (32, 8), 1024, length, head_dim=head_dim)
    assert written(compiled, 8 * length * head_dim * 2) == []


def test_blocks_of_queries_that_do_not_fit_scalar_memory_are_refused():
    """Each block of queries has a span of tiles. The most that are accepted are half of what Mosaic takes."""

    def attend(batch):
        q, k = (((batch, 8, length, 16), jnp.bfloat16) for length in (1, 128))
        at = ((batch, 1), jnp.int32), ((batch, 8, 128), jnp.int32)
        ahead("v5e:2x2", partial(by_position.by_position, scale=0.1), q, k, k, *at)

    attend(8192)
    with pytest.raises(NotImplementedError, match="65,544 blocks of 128 queries: expected at most 65,536"):
        attend(8193)


@pytest.mark.parametrize("chip", part(CHIPS, ["v5e:2x2"]))
def test_other_shapes(chip):
    """Groups, query rows and dtypes of other models, and the longest rows."""
    later_chunk(chip, (28, 4), 100, 3000, biased=True, window=4096)
    later_chunk(chip, (40, 8), 4096, 8192, dtype=jnp.float32)
    for heads, queries in (((8, 8), 1), ((28, 4), 8), ((16, 2), 64)):
        slots(chip, 2, heads, 3000, queries=queries, received="max")
        scores(chip, 2, heads, 3000, queries, lse=False, reduction=Reduction("mean", "max", "group"))
    slots(chip, 2, (32, 8), 3000, dtype=jnp.float32, received="mean")
    for queries in (100, 2048):
        later_chunk(chip, (8, 4), queries, 3000, softcap=50.0)
    slots(chip, 2, (8, 4), 3000, received="max", softcap=50.0)
    scores(chip, 1, (8, 4), 3000, 32, lse=False, softcap=50.0)
    scores(chip, 1, (32, 8), 1 << 20, 200, reduction=Reduction("max", "mean", "rows"))
    x, count = ((1, 8, 1 << 20), jnp.float32), ((1, 8), jnp.int32)
    ahead(chip, partial(top.top_tokens, size=1 << 16), x, ((1, 8, 1 << 20), jnp.int32), count)


@pytest.mark.parametrize(
    ("chip", "head_dim", "policy"),
    part(
        product(CHIPS, [64, 80, 96], ["snapkv:budget=1024,window=32", "dynamickv:budget=1024"]),
        [
            ("v6e:2x2", 64, "dynamickv:budget=1024"),
            *((chip, d, "snapkv:budget=1024,window=32") for chip, d in (("v6e:2x2", 80), ("v5e:2x2", 96))),
        ],
    ),
)
def test_a_step_turns_no_entries_around(chip, head_dim, policy):
    """A decode step of heads that do not fill vector lanes writes one entry, and attends, in the same layout."""
    try:
        mesh = kvjax.make_mesh(devices=target(chip).devices()[:1])
    except ImportError as error:
        pytest.skip(str(error))
    config = replace(decoder().config, windows=(None,), num_heads=32, num_kv_heads=8, head_dim=head_dim)
    sizes = {"batch": 8, "length": 4096, "new_tokens": 64}
    compiled = lower_decode(config, kvjax.policies.parse(policy), mesh=mesh, **sizes).compile()
    keys = 8 * 8 * 1024 * head_dim * 2
    assert Loop.of(compiled.as_text()).rewrites(keys) == []
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes > 2 * keys > 4 * memory.temp_size_in_bytes
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2


def test_tiles_are_as_large_as_the_chip_is_fast():
    """In a mesh of absent devices, kernels know the devices."""
    chips = {}
    for name in CHIPS:
        kind = name.split(":")[0]
        ahead(name, lambda x, kind=kind: chips.update({kind: mosaic.chip()}) or x, ((8,), jnp.float32))
    assert chips == cases.CHIPS


def test_mosaic_refuses_tiles_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(mosaic, "TILE_BYTES", 12 << 20)
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        slots("v6e:2x2", 1, (32, 8), 131_072)

"""What the TPU kernels fetch, from the index maps of their grids: occupied parts of a tile, and nothing twice."""

from importlib import import_module
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kvjax.pallas_kernels import QuantizedArray
from tests.pallas_kernels.cases import CHIPS
from tests.products import part

prompt, slot, segment = (
    import_module(f"kvjax.pallas_kernels.{name}.mosaic_tpu")
    for name in ("prompt_attention", "slot_attention", "segment_attention")
)
mosaic, decode, by_position = (
    import_module(f"kvjax.pallas_kernels.{name}")
    for name in ("mosaic", "mosaic_decode", "prompt_attention.mosaic_by_position")
)


class Fetched(NamedTuple):
    """What a kernel call would fetch.

    Attributes:
        steps: of the grid.
        blocks: the number of blocks of each operand.
        nbytes: of these blocks.
    """

    steps: int
    blocks: list[int]
    nbytes: list[int]


@pytest.fixture
def calls(monkeypatch):
    """A list that each kernel call adds to. No kernel runs.

    Mosaic fetches a block whenever a step's block differs from that of the step before. The cores of a chip share the
    first axis of a grid, and each fetches a block in its first step.
    """
    calls, call = [], pl.pallas_call

    def counting(body, *, grid_spec, **options):
        kernel = call(body, grid_spec=grid_spec, **options)

        def run(*operands):
            given = grid_spec.num_scalar_prefetch
            scalars, arrays = [jnp.asarray(x) for x in operands[:given]], jax.tree.leaves(operands[given:])
            specs = jax.tree.leaves(grid_spec.in_specs, is_leaf=lambda x: isinstance(x, pl.BlockSpec))
            sides = [int(n) for n in grid_spec.grid]
            steps = np.indices(sides).reshape(len(sides), -1)
            other_core = np.diff(steps[0] * min(decode.chip().cores, sides[0]) // sides[0]) > 0

            def blocks(spec):
                return jax.vmap(lambda *step: jnp.stack(spec.index_map(*step, *scalars)))(*steps)

            each = jax.jit(lambda: [blocks(spec) for spec in specs])()
            counts = [1 + int((np.any(np.diff(np.asarray(x), axis=0), axis=1) | other_core).sum()) for x in each]
            sizes = [
                np.prod([n for n in spec.block_shape if isinstance(n, int)]) * x.dtype.itemsize
                for spec, x in zip(specs, arrays, strict=True)
            ]
            nbytes = [count * int(size) for count, size in zip(counts, sizes, strict=True)]
            calls.append(Fetched(steps.shape[1], counts, nbytes))
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(kernel, *operands))

        return run

    monkeypatch.setattr(pl, "pallas_call", counting)
    return calls


@pytest.mark.slow
def test_only_occupied_tiles_take_a_step_and_only_occupied_parts_are_fetched(calls, monkeypatch):
    """Parts have 128 entries. A head without entries takes a step and fetches nothing."""
    monkeypatch.setattr(mosaic, "TILE_BYTES", 1)
    bounds = np.array([[600, 1, 128, 129], [0, 300, 0, 512]])
    q, k = np.zeros((2, 8, 1, 128), np.float32), np.zeros((2, 4, 600, 128), np.float32)
    at = np.arange(600)
    positions = np.where(at < bounds[..., None], at, -1)
    slot.slot_attention(q, k, k, np.full((2, 1), 700), positions, scale=0.1, interpret=True)
    _, _, *parts = calls[-1].blocks
    assert calls[-1].steps == np.maximum(-(-bounds // (4 * 128)), 1).sum() == 9
    assert sum(parts[:4]) == sum(parts[4:8]) == (-(-bounds // 128)).sum()
    assert parts[8] == (-(-bounds // (4 * 128))).sum()  # of positions, which are fetched by tile
    # The segments of all heads lie one after another in one lane. Heads share the parts at their ends.
    bounds = np.array([[1000, 1, 128, 129], [600, 300, 40, 512]])
    sizes, pool = bounds + -bounds % 16, np.zeros((2, 1, 2048, 128), np.float32)
    start = np.cumsum(sizes, axis=1) - sizes
    given = np.full((2, 1), 2000), np.zeros((2, 1, 2048), np.int32), start, bounds
    segment.segment_attention(q, pool, pool, *given, scale=0.1, interpret=True)
    _, _, *parts = calls[-1].blocks
    assert calls[-1].steps == (-(-(start + bounds) // (8 * 128)) - start // (8 * 128)).sum() == 9
    assert sum(parts[:8]) == sum(parts[8:16]) == (-(-(start + bounds)[:, -1] // 128)).sum()
    # 256 queries in two blocks follow 300 cached slots. The first block sees 4 of 5 tiles of 128, the second sees all.
    monkeypatch.setattr(by_position, "BLOCK_ROWS", 1)
    monkeypatch.setattr(by_position, "MOST_TILE_KEYS", 128)
    q, k = np.zeros((1, 2, 256, 128), np.float32), np.zeros((1, 2, 556, 128), np.float32)
    t, p = np.arange(300, 556, dtype=np.int32)[None], np.broadcast_to(np.arange(556, dtype=np.int32), (1, 2, 556))
    prompt.prompt_attention(q, k, k, t, p, scale=0.1, interpret=True)
    assert calls[-1].blocks[2:4] == [2 * (4 + 5)] * 2


CACHES = {  # batch 2, four heads: the number of entries of each
    "full": np.full((2, 4), 16_384),
    "unequal": np.array([[16_384, 1, 1024, 1025], [0, 7000, 4096, 12_289]]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bits"), part(product(CHIPS, [16, 8, 4]), [("v5e", 4), ("v5p", 16), ("v6e", 16), ("v6e", 8)])
)
def test_the_bytes_that_a_chip_fetches_are_those_of_the_entries(calls, name, bits, monkeypatch):
    """With tiles of the chip's own size. The last part of a head has less than a part without entries."""
    chip, slots = mosaic.Chip(*CHIPS[name]), 16_384
    monkeypatch.setattr(decode, "chip", lambda: chip)
    q, at = np.zeros((2, 8, 1, 128), jnp.bfloat16), np.arange(slots)
    k = np.zeros((2, 4, slots, 128), jnp.bfloat16)
    if bits < 16:
        scales = np.zeros((2, 4, slots, 4), jnp.bfloat16)
        k = QuantizedArray(np.zeros((2, 4, slots, 16 * bits), np.int8), scales, bits, jnp.dtype(jnp.bfloat16))
    of_entry = sum(x.nbytes for x in jax.tree.leaves(k)) // (2 * 4 * slots)
    for cache, held in CACHES.items():
        positions = np.where(at < held[..., None], at, -1)
        slot.slot_attention(q, k, k, np.full((2, 1), slots), positions, scale=0.1, interpret=True)
        least, entries = held.sum() * 2 * of_entry, 4 * len(jax.tree.leaves(k)) * 2
        fetched = sum(calls[-1].nbytes[2 : 2 + entries])
        if cache == "full" and bits == 16:  # parts of codes do not divide the slots
            assert fetched == least
        # The first step of a second core fetches all parts of a tile.
        parts = np.count_nonzero(held) + 4 * (chip.cores - 1)
        assert least <= fetched <= least + 2 * parts * chip.tile_bytes // 4

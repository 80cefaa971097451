"""ChunkKV's selection of chunks against plain Python and against kvpress's rules."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import kvjax
from kvjax.mesh.heads import Heads
from kvjax.parts import Chunks, TopTokens
from kvjax.policies import chunkkv, snapkv
from kvjax.policy import Ranked
from tests import tiny

LENGTHS, SLOTS, SIZE = (40, 23, 9, 31), 40, 20
keep = jax.jit(lambda part, *rest: part.keep(Ranked(*rest)), static_argnums=(0, 4))


def drawn(heads=4, aligned=False):
    """Scores, positions and counts of rows of different lengths, with a sink and two recent tokens protected."""
    rng = np.random.default_rng(4)
    positions = np.full((len(LENGTHS), heads, SLOTS), -1)
    for row, length in enumerate(LENGTHS):
        for head in range(heads):
            held = np.arange(length) if aligned else rng.permutation(np.sort(rng.choice(60, length, replace=False)))
            positions[row, head, SLOTS - length :] = held
    scores = rng.normal(size=positions.shape).astype(np.float32)
    last = positions.max(axis=(1, 2), keepdims=True)
    scores[(positions == 0) | (positions >= last - 1)] = np.inf
    scores[positions < 0] = -np.inf
    return scores, positions, rng.integers(5, SIZE + 1, positions.shape[:2]).astype(np.int32)


def kept(index, positions, row, head):
    index = np.asarray(index[row, head])
    return sorted(positions[row, head, index[index >= 0]].tolist())


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("length", [1, 5, 64])
def test_chunks_are_retained_together(length, aligned):
    scores, positions, counts = drawn(aligned=aligned)
    index = keep(Chunks(TopTokens(), length), scores, positions, counts, SIZE)
    for row in range(len(LENGTHS)):
        chunks: dict[int, list[float]] = {}
        for p, s in zip(positions[row].ravel(), scores[row].ravel(), strict=True):
            if np.isfinite(s):
                chunks.setdefault(p // length, []).append(float(s))
        for head in range(positions.shape[1]):
            own = dict(zip(positions[row, head].tolist(), scores[row, head].tolist(), strict=True))
            wanted = [p for p, s in own.items() if s == np.inf]
            for chunk in sorted(chunks, key=lambda chunk: -np.mean(chunks[chunk])):
                wanted += sorted(p for p, s in own.items() if np.isfinite(s) and p // length == chunk)
            assert kept(index, positions, row, head) == sorted(wanted[: counts[row, head]])


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_chunks_on_a_mesh_are_those_of_one_device():
    arrays = drawn()
    cut = PartitionSpec("data", "model")

    @jax.jit
    @partial(jax.shard_map, mesh=kvjax.make_mesh(2, 4), in_specs=cut, out_specs=cut, check_vma=False)
    def select(scores, positions, counts):
        return Chunks(TopTokens(), 5).keep(Ranked(scores, positions, counts, SIZE, Heads(kv_axis="model")))

    np.testing.assert_array_equal(select(*arrays), keep(Chunks(TopTokens(), 5), *arrays, SIZE))


def kvpress(scores, length, ratio):
    """The positions that kvpress's ChunkKVPress retains of scores [H, N]."""
    n = scores.shape[1]
    chunks = [range(start, min(n, start + length)) for start in range(0, n, length)]
    ranked = sorted(chunks, key=lambda chunk: -scores[:, list(chunk)].sum(axis=0).mean())
    return sorted(p for chunk in ranked[: max(1, int(len(chunks) * ratio))] for p in chunk)


@pytest.mark.parametrize(("size", "window"), [(160, 20), (160, 16), (157, 20)])
def test_kvpress_differs_at_chunks_that_are_cut_only(size, window):
    """Half of a prompt in chunks of 10. kvpress raises the window above all scores, and what it shares chunks with."""
    rng, differing = np.random.default_rng(9), 0
    positions = np.broadcast_to(np.arange(size), (1, 4, size))
    for _ in range(4):
        scores = rng.gamma(1, size=(1, 4, size)).astype(np.float32)
        own = np.where(positions >= size - window, np.inf, scores)
        index = keep(Chunks(TopTokens(), 10), own, positions, np.full((1, 4), 80, np.int32), 80)
        raised = np.where(positions >= size - window, scores[..., : size - window].max() + 1, scores)
        ours, theirs = (set(kept(index, positions, 0, 0)), set(kvpress(raised[0], 10, 0.5)))
        cut = (size - window) // 10 * 10
        if (size - window) % 10 == 0 and size % 10 == 0:
            assert ours == theirs
            continue
        differing += ours != theirs
        assert {p for p in theirs - ours if p >= cut} == set(range(cut, size - window)) - ours
        by_chunk = [{p // 10 for p in own if p < cut} for own in (ours, theirs)]
        assert len(by_chunk[0] ^ by_chunk[1]) <= 1 + (size % 10 > 0)  # the chunk that takes the room of the cut one
    assert differing or size % 10 == 0 == window % 10


def test_chunkkv_retains_the_same_text_in_all_heads():
    """The budget has room for two chunks of ten beside the window."""
    sizes = (48, 38)
    rows = [np.random.default_rng(1).integers(0, tiny.VOCAB, n) for n in sizes]
    _, cache = tiny.prefill(tiny.decoder(), chunkkv(snapkv(28, window=8), length=10), rows, 48)
    for row, size in enumerate(sizes):
        heads = tiny.held(cache, row)[0]
        assert heads[0] == heads[1]
        assert len({p // 10 for p in heads[0] if p < size - 8}) == 2
        assert len(heads[0]) == 28

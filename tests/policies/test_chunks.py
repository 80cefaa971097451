"""Selections by stretches of text against the same in plain Python; ChunkKV and FINCH."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import kvjax
from kvjax.heads import Heads
from kvjax.models import rotate
from kvjax.parts import Chunks, EvenChunks, TopTokens
from kvjax.policies import chunkkv, finch, parse, snapkv
from tests import tiny

LENGTHS, SLOTS, SIZE = (40, 23, 9, 31), 40, 20
keep = jax.jit(lambda part, *rest: part.keep(*rest), static_argnums=(0, 4))


def drawn(heads=4, aligned=False, ties=False):
    """Scores, positions and counts: rows of different lengths, a sink and two recent tokens that are protected."""
    rng = np.random.default_rng(4)
    positions = np.full((len(LENGTHS), heads, SLOTS), -1)
    for row, length in enumerate(LENGTHS):
        for head in range(heads):
            held = np.arange(length) if aligned else rng.permutation(np.sort(rng.choice(60, length, replace=False)))
            positions[row, head, SLOTS - length :] = held
    scores = rng.normal(size=positions.shape).astype(np.float32)
    if ties:
        scores = np.round(scores)
    last = positions.max(axis=(1, 2), keepdims=True)
    scores[(positions == 0) | (positions >= last - 1)] = np.inf
    scores[positions < 0] = -np.inf
    return scores, positions, rng.integers(5, SIZE + 1, positions.shape[:2]).astype(np.int32)


def kept(index, positions, row, head):
    index = np.asarray(index[row, head])
    return sorted(positions[row, head, index[index >= 0]].tolist())


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("length", [1, 5, 64])
def test_chunks_stay_or_go_together(length, aligned):
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


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_runs_keep_the_same_share(length, ties):
    scores, positions, counts = drawn(ties=ties)
    index = keep(EvenChunks(length=length), scores, positions, counts, SIZE)
    for row, head in np.ndindex(positions.shape[:2]):
        own = dict(zip(positions[row, head].tolist(), scores[row, head].tolist(), strict=True))
        wanted = [p for p, s in own.items() if s == np.inf]
        rest = sorted(p for p, s in own.items() if np.isfinite(s))
        room = min(counts[row, head] - len(wanted), len(rest))
        runs = [rest[i : i + length] for i in range(0, len(rest), length)]
        shares = [len(run) * room // len(rest) for run in runs]
        for i in range(room - sum(shares)):
            shares[i] += 1
        for run, share in zip(runs, shares, strict=True):
            wanted += sorted(run, key=lambda p, own=own: (-own[p], p))[:share]
        assert kept(index, positions, row, head) == sorted(wanted)
        assert len(wanted) == min(counts[row, head], len(own) - (-1 in own))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_chunks_on_a_mesh_are_those_of_one_device():
    arrays = drawn()
    cut = PartitionSpec("data", "model")

    @jax.jit
    @partial(jax.shard_map, mesh=kvjax.make_mesh(2, 4), in_specs=cut, out_specs=cut, check_vma=False)
    def select(scores, positions, counts):
        return Chunks(TopTokens(), 5).keep(scores, positions, counts, SIZE, Heads(kv_axis="model"))

    np.testing.assert_array_equal(select(*arrays), keep(Chunks(TopTokens(), 5), *arrays, SIZE))


def test_chunkkv_keeps_the_same_text_in_all_heads():
    """Room for two chunks of ten beside the window."""
    sizes = (48, 38)
    rows = [np.random.default_rng(1).integers(0, tiny.VOCAB, n) for n in sizes]
    _, cache = tiny.prefill(tiny.decoder(), chunkkv(snapkv(28, window=8), length=10), rows, 48)
    for row, size in enumerate(sizes):
        heads = tiny.held(cache, row)[0]
        assert heads[0] == heads[1]
        assert len({p // 10 for p in heads[0] if p < size - 8}) == 2
        assert len(heads[0]) == 28


@pytest.mark.parametrize("rescale", [True, False])
def test_finch_weighs_the_question_s_tokens_by_what_is_before_them(rescale):
    """Against softmax and product in NumPy."""
    rng = np.random.default_rng(2)
    (row,), window = [rng.integers(0, tiny.VOCAB, 30)], 6
    policy = finch(16, window=window, rescale=rescale)
    heads, seen = [], {}

    def attend(layer, q, k, v, cache):
        frequencies = layer.rope.frequencies(q.shape[-1])
        q, k = (rotate(x, jnp.arange(30)[None, None], frequencies, layer.rope.attention_factor) for x in (q, k))
        seen["q"], seen["k"] = np.asarray(q[0], np.float64), np.asarray(k[0], np.float64)
        return jnp.zeros_like(q), cache

    params = tiny.decoder()
    params(jnp.asarray(row)[None], attend)
    for head in range(2):
        scores = np.zeros(24)
        for query in (2 * head, 2 * head + 1):
            for t in range(24, 30):
                logits = seen["q"][query, t] @ seen["k"][head, : t + 1].T * params.config.scale
                weights = np.exp(logits - logits.max())
                scores += (weights / weights.sum())[:24] * (t if rescale else 1)
        heads.append(sorted(np.argsort(-scores)[:10].tolist()) + list(range(24, 30)))
    _, cache = tiny.prefill(params, policy, [row], 32)
    assert tiny.held(cache, 0)[0] == heads


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("chunkkv:length=0", "length=0: accepted is an integer >= 1"),
        ("chunkkv:base=chunkkv", "Chunks of what Chunks select: accepted is another base"),
        ("finch:chunk=0", "length=0: accepted is an integer >= 1"),
        ("finch:window=0", "window=0: accepted is an integer >= 1"),
    ],
)
def test_what_makes_no_sense(text, says):
    with pytest.raises(ValueError, match=says):
        parse(text)

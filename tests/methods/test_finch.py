"""FINCH: the same share of every chunk against plain Python, and the question's weights against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models import rotate
from kvjax.parts import EvenChunks
from kvjax.policies import finch
from kvjax.policy import Ranked
from tests import tiny

LENGTHS, HEADS, SLOTS, SIZE = (40, 23, 9, 31), 4, 40, 20
keep = jax.jit(lambda part, *rest: part.keep(Ranked(*rest)), static_argnums=(0, 4))


def drawn(ties):
    """Scores, positions and counts: rows of different lengths, a sink and two recent tokens that are protected."""
    rng = np.random.default_rng(4)
    positions = np.full((len(LENGTHS), HEADS, SLOTS), -1)
    for row, length in enumerate(LENGTHS):
        for head in range(HEADS):
            held = rng.permutation(np.sort(rng.choice(60, length, replace=False)))
            positions[row, head, SLOTS - length :] = held
    scores = rng.normal(size=positions.shape).astype(np.float32)
    if ties:
        scores = np.round(scores)
    last = positions.max(axis=(1, 2), keepdims=True)
    scores[(positions == 0) | (positions >= last - 1)] = np.inf
    scores[positions < 0] = -np.inf
    return scores, positions, rng.integers(5, SIZE + 1, positions.shape[:2]).astype(np.int32)


def even(scores, room, length):
    """The positions that runs of `length` retain of `room` in all, from a dictionary of scores by position."""
    rest = sorted(scores)
    runs = [rest[i : i + length] for i in range(0, len(rest), length)]
    shares = [len(run) * room // len(rest) for run in runs]
    for i in range(room - sum(shares)):
        shares[i] += 1
    return [p for run, n in zip(runs, shares, strict=True) for p in sorted(run, key=lambda p: (-scores[p], p))[:n]]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("length", [1, 7, 64])
def test_runs_retain_the_same_share(length, ties):
    scores, positions, counts = drawn(ties)
    index = np.asarray(keep(EvenChunks(length), scores, positions, counts, SIZE))
    for row, head in np.ndindex(positions.shape[:2]):
        own = dict(zip(positions[row, head].tolist(), scores[row, head].tolist(), strict=True))
        wanted = [p for p, s in own.items() if s == np.inf]
        rest = {p: s for p, s in own.items() if np.isfinite(s)}
        wanted += even(rest, min(counts[row, head] - len(wanted), len(rest)), length)
        chosen = index[row, head][index[row, head] >= 0]
        assert sorted(positions[row, head, chosen].tolist()) == sorted(wanted)
        assert len(wanted) == min(counts[row, head], len(own) - (-1 in own))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("rescale", "chunk"), [(True, 7), (True, None), (False, None)])
def test_weighs_the_question_by_the_tokens_before_it(rescale, chunk):
    """In NumPy. Of 24 tokens of the document 10 stay; of runs of 7 tokens, 3, 3, 3 and 1."""
    rng = np.random.default_rng(2)
    (row,), window = [rng.integers(0, tiny.VOCAB, 30)], 6
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
        best = np.argsort(-scores)[:10].tolist() if chunk is None else even(dict(enumerate(scores)), 10, chunk)
        heads.append(sorted(best) + list(range(24, 30)))
    _, cache = tiny.prefill(params, finch(16, window, chunk, rescale), [row], 32)
    assert tiny.held(cache, 0)[0] == heads


def test_runs_and_budgets_whose_product_exceeds_32_bits_are_refused():
    shapes = [jax.ShapeDtypeStruct((1, 1, 2**16), dtype) for dtype in ("float32", "int32")]
    counts = jax.ShapeDtypeStruct((1, 1), "int32")
    with pytest.raises(ValueError, match="chunk=65536 with a budget of 32768 entries: expected a product below 2"):
        jax.eval_shape(lambda *given: EvenChunks(2**20).keep(Ranked(*given, 2**15)), *shapes, counts)

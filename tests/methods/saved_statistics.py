"""Heads in NumPy under a score that reads keys, values and positions alone, beside a decoder of one layer."""

from __future__ import annotations

import numpy as np

import kvjax
from tests import tiny

SIZE, STEPS = 32, 7
RNG = np.random.default_rng(5)
ROWS = [RNG.integers(0, tiny.VOCAB, n) for n in (30, 17, 1)]
ANSWER = RNG.integers(0, tiny.VOCAB, (STEPS, len(ROWS)))


def decoder(group, statistics=None):
    """A decoder of one layer with two kv heads, and its statistics by name, [Hq or H, ...] in float64."""
    params = tiny.decoder(2 * group, 2)
    given = tiny.random_statistics(params.config) if statistics is None else statistics
    return kvjax.with_statistics(params, given), {name: np.asarray(x[0], np.float64) for name, x in given.items()}


def entries_by_position(params, text):
    """Keys after RoPE and values [H, N, D] of a text, in float64. In a first layer they depend on their token alone."""
    (layer,) = kvjax.prefill(params, [text]).entries
    order = np.argsort(np.asarray(layer.positions[0]), axis=-1)[:, -len(text) :]
    return (
        np.take_along_axis(np.asarray(x[0], np.float64), order[..., None], axis=1) for x in (layer.keys, layer.values)
    )


def best(scores, positions, now, count, sinks, recent):
    """The positions of `count` entries: the protected ones, then those with the largest scores."""
    protected = (positions < sinks) | (positions >= now - recent)
    ranked = np.where(protected, np.inf, scores)
    return np.sort(positions[np.argsort(-ranked, kind="stable")[:count]])


def assert_follows(params, policy, score, budget, sinks, recent, every):
    """Reads prompts of different lengths, decodes, and compares what each head holds after each call.

    Args:
        policy: as text.
        score: of the entries of kv head h, from keys and values [N, D], positions [N] and the next position.
    """
    texts = [[*row, *ANSWER[:, b]] for b, row in enumerate(ROWS)]
    known = [tuple(entries_by_position(params, text)) for text in texts]

    def retained(b, h, held, now, count):
        keys, values = (x[h][held] for x in known[b])
        return best(score(h, keys, values, held, now), held, now, count, sinks, recent)

    held = [[retained(b, h, np.arange(len(row)), len(row), budget) for h in (0, 1)] for b, row in enumerate(ROWS)]
    _, cache = tiny.prefill(params, policy, ROWS, SIZE, room=STEPS)
    for t in range(STEPS + 1):
        for b in range(len(ROWS)):
            assert tiny.held(cache, b) == [[own.tolist() for own in held[b]]], (t, b)
        if t == STEPS:
            return
        for b, row in enumerate(ROWS):
            now = len(row) + t
            for h, own in enumerate(held[b]):
                if every is not None and len(own) >= budget:
                    own = retained(b, h, own, now, budget - every)
                held[b][h] = np.append(own, now)
        _, cache = tiny.step(params, cache, ANSWER[t], np.ones(len(ROWS), bool))

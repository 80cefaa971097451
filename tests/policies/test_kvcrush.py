"""KVCrush against its Algorithms 1 and 2 in plain Python, and the worked examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.heads import ALL_HEADS
from kvjax.parts import Representatives, TopTokens
from kvjax.policies import kvcrush, parse, snapkv
from tests import tiny

BITS = np.array([[bit == "1" for bit in token] for token in ["1100", "0000", "1111", "1000", "0110", "1110", "0001"]])


def picked(bits, anchor, wanted, pick):
    """The tokens that stand for all of `bits`, which are one head's."""
    part = Representatives(TopTokens(), 0.5, pick=pick)
    n = len(bits)
    marked = part.representatives(
        jnp.asarray(bits)[None, None],
        jnp.array(anchor, bool)[None, None],
        jnp.ones((1, 1, n), bool),
        jnp.arange(n)[None, None],
        jnp.array([[wanted]]),
        wanted,
    )
    return np.flatnonzero(marked[0, 0]).tolist()


@pytest.mark.parametrize(
    ("anchor", "centroid", "grid"),
    [
        ([1, 1, 0, 0], [0, 1, 2], [0, 1, 6]),
        ([0, 1, 0, 1], [0, 1, 5], [2, 5, 6]),
        ([0, 0, 0, 0], [0, 1, 5], [0, 1, 2]),
    ],
)
def test_g7(anchor, centroid, grid):
    assert picked(BITS, anchor, 3, "centroid") == centroid
    assert picked(BITS, anchor, 3, "grid") == grid


def test_g7_mean_anchor():
    anchor = Representatives(TopTokens(), 0.5)._anchor(
        jnp.asarray(BITS)[None, None], jnp.ones((1, 1, 7), bool), ALL_HEADS
    )
    assert anchor[0, 0].tolist() == [True, True, False, False]


def test_k_means_finds_clusters_that_are_apart():
    """Four tokens and two, whose runs of three do not part them: the middle of the four, the earlier of the two."""
    tokens = ["111100", "111000", "110000", "111010", "000111", "000011"]
    bits = np.array([[bit == "1" for bit in token] for token in tokens])
    assert picked(bits, [1, 1, 1, 0, 0, 0], 2, "kmeans") == [1, 4]
    assert picked(bits, [1, 1, 1, 0, 0, 0], 2, "centroid") == [1, 5]


def literal(heads, counts, share, anchor, pick, upper, protected):
    """Algorithms 1 and 2 on one row: `heads` are {position: score} by head. Returns the positions kept by each head."""
    important, left = [], []
    for held, count in zip(heads, counts, strict=True):
        ranked = sorted(held, key=lambda p, held=held: (p not in protected, -held[p], p))
        wanted = min(int(count * share), max(count - len(protected & set(held)), 0))
        important.append(set(ranked[: count - wanted]))
        left.append([p for p in ranked if p not in important[-1]])
    bits = {}
    for p in set().union(*heads):
        bits[p] = [p in kept or p in out[: int(len(out) * upper)] for kept, out in zip(important, left, strict=True)]
    if anchor == "mean":
        votes = np.array([bits[p] for out in left for p in out]).reshape(-1, len(heads))
        anchor = [2 * sum(column) > len(column) for column in votes.T]
    else:
        anchor = [f % 2 == 1 for f in range(len(heads))]
    kept = []
    for held, count, first, out in zip(heads, counts, important, left, strict=True):
        wanted = min(int(count * share), max(count - len(protected & set(held)), 0), len(out))
        out = sorted(out, key=lambda p: (sum(a != b for a, b in zip(bits[p], anchor, strict=True)), p))
        chosen = set()
        for i in range(wanted):
            if pick == "grid":
                chosen.add(out[i * (len(out) - 1) // max(wanted - 1, 1)])
                continue
            run = out[i * len(out) // wanted : (i + 1) * len(out) // wanted]
            mean = np.mean([bits[p] for p in run], axis=0)
            off = {p: round(float(np.abs(np.array(bits[p]) - mean).sum()), 9) for p in run}
            chosen.add(min(run, key=lambda p, off=off: (off[p], p)))
        kept.append(sorted(first | chosen))
    return kept


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("pick", ["centroid", "grid"])
@pytest.mark.parametrize(("anchor", "share", "upper"), [("mean", 0.25, 0.5), ("alternate", 0.6, 0.3)])
def test_is_the_literal_algorithm(anchor, share, upper, pick, aligned):
    """Three rows of different lengths, five heads with budgets of their own, slots with different tokens."""
    rng = np.random.default_rng(3)
    rows, heads, size, slots = 3, 5, 20, 40
    positions = np.full((rows, heads, slots), -1)
    for row, length in enumerate((40, 23, 9)):
        held = np.arange(length)
        for head in range(heads):
            if not aligned:
                held = np.sort(rng.choice(60, length, replace=False))
            positions[row, head, slots - length :] = rng.permutation(held) if not aligned else held
    scores = rng.integers(0, 12, positions.shape).astype(np.float32)  # with ties
    protected = (positions >= 0) & (positions < 2)
    scores[protected], scores[positions < 0] = np.inf, -np.inf
    counts = rng.integers(8, size + 1, (rows, heads))
    part = Representatives(TopTokens(), share, anchor=anchor, pick=pick, upper=upper)
    index = np.asarray(jax.jit(part.keep, static_argnums=3)(scores, positions, counts, size))
    for row in range(rows):
        texts = [
            {int(p): float(s) for p, s in zip(positions[row, h], scores[row, h], strict=True) if p >= 0}
            for h in range(heads)
        ]
        expected = literal(texts, counts[row].tolist(), share, anchor, pick, upper, {0, 1})
        got = [sorted(positions[row, h, index[row, h][index[row, h] >= 0]].tolist()) for h in range(heads)]
        assert got == expected


def test_random_anchor_is_the_seed_s():
    def tokens(seed):
        rng = np.random.default_rng(0)
        policy = parse(f"kvcrush:base=h2o,base.budget=12,base.recent=2,share=0.5,anchor=random,seed={seed}")
        _, cache = tiny.prefill(tiny.decoder(), policy, [rng.integers(0, tiny.VOCAB, 24)], 24)
        return tiny.held(cache, 0)

    assert tokens(0) == tokens(0)
    assert any(tokens(0) != tokens(seed) for seed in (1, 2, 3))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("share=0.0", "share=0.0.*above 0 and below 1"),
        ("share=1.0", "share=1.0.*above 0 and below 1"),
        ("share=1", "share=1:.*float"),
        ("upper=1.5", "upper=1.5"),
        ("anchor=median", "anchor='median'.*'alternate'"),
        ("pick=first", "pick='first'.*'kmeans'"),
        ("seed=-1", "seed=-1"),
        ("base=snapkv,base.budget=40,share=0.02", "share=0.02 of a budget of 40 entries is none"),
        ("base=kvcrush", "another base"),
    ],
)
def test_what_makes_no_sense(options, says):
    with pytest.raises(ValueError, match=says):
        parse(f"kvcrush:{options}")


def test_nothing_beyond_a_budget_that_covers_the_prompt():
    policy = kvcrush(snapkv(24, window=4), share=0.5)
    _, cache = tiny.prefill(tiny.decoder(), policy, [np.arange(20)], 24)
    assert tiny.held(cache, 0)[0][0] == list(range(20))

"""KVCrush against its Algorithms 1 and 2 in plain Python, and the worked examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.heads import ALL_HEADS
from kvjax.parts import Representatives, TopTokens
from kvjax.parts.signatures import Signatures
from kvjax.policies import h2o, kvcrush, parse, snapkv
from tests import tiny
from tests.policies.reference import attended

BITS = np.array([[bit == "1" for bit in token] for token in ["1100", "0000", "1111", "1000", "0110", "1110", "0001"]])


def picked(bits, anchor, wanted, pick):
    """The tokens that stand for all of `bits`, which are one head's."""
    part = Representatives(TopTokens(), 0.5, pick=pick)
    n = len(bits)
    marked = part.representatives(
        Signatures(jnp.asarray(bits)[None, None]),
        jnp.array(anchor, bool)[None, None, None],
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
        Signatures(jnp.asarray(BITS)[None, None]), jnp.ones((1, 1, 7), bool), ALL_HEADS
    )
    assert anchor[0, 0, 0].tolist() == [True, True, False, False]


def test_k_means_finds_clusters_that_are_apart():
    """Four tokens and two, whose runs of three do not part them: the middle of the four, the earlier of the two."""
    tokens = ["111100", "111000", "110000", "111010", "000111", "000011"]
    bits = np.array([[bit == "1" for bit in token] for token in tokens])
    assert picked(bits, [1, 1, 1, 0, 0, 0], 2, "kmeans") == [1, 4]
    assert picked(bits, [1, 1, 1, 0, 0, 0], 2, "centroid") == [1, 5]


def cut(held, protected, page):
    """{name: its tokens} of a head's pages, what is protected left out."""
    pages = {}
    for p in sorted(set(held) - protected):
        pages.setdefault(p // page, []).append(p)
    return pages


def literal(
    heads, counts, share, anchor="mean", pick="centroid", upper=0.5, protected=(), page=1, side_by_side=False, ages=None
):
    """Algorithms 1 and 2 on one row, of tokens or of pages: the positions kept by each of `heads`, {position: score}.

    Bits are each page's own, one a head, by its mean score; or those of its tokens `side_by_side`.
    """
    protected, compared = set(protected), [dict(held) for held in heads]
    if ages is not None:
        compared = [{p: score / np.float32(ages[p]) for p, score in held.items()} for held in heads]
    pages = [cut(held, protected, page) for held in heads]

    def ranked(scores, names):
        mean = {name: np.float32(sum(scores[p] for p in names[name])) / np.float32(len(names[name])) for name in names}
        return sorted(names, key=lambda name: (-mean[name], name))

    free = [count - len(protected & set(held)) for held, count in zip(heads, counts, strict=True)]
    wanted = [min(int(count * share), max(f, 0)) // page for count, f in zip(counts, free, strict=True)]
    kept = [ranked(h, p)[: max(f, 0) // page - w] for h, p, f, w in zip(heads, pages, free, wanted, strict=True)]
    left = [{name: p[name] for name in p if name not in k} for p, k in zip(pages, kept, strict=True)]
    ones = []  # of each head, what has its bit
    for scores, held, p, k, out in zip(compared, heads, pages, kept, left, strict=True):
        if side_by_side:
            tokens = {q: [q] for name in out for q in out[name]}
            best = ranked(scores, tokens)[: int(len(tokens) * upper)]
            ones.append((protected & set(held)) | {q for name in k for q in p[name]} | set(best))
        else:
            best = ranked(scores, out)[: int(len(out) * upper)]
            ones.append({*k, *best, *(protected & set(held) if page == 1 else ())})

    def bits(name, tokens):
        if not side_by_side:
            return np.array([name in one for one in ones])
        vector = np.zeros((page, len(heads)), bool)
        for q in tokens:
            vector[q % page] = [q in one for one in ones]
        return vector.ravel()

    vectors = [{name: bits(name, out[name]) for name in out} for out in left]
    width = len(heads) * (page if side_by_side else 1)
    everyone = np.array([vector for own in vectors for vector in own.values()]).reshape(-1, width)
    anchor = 2 * everyone.sum(axis=0) > len(everyone) if anchor == "mean" else np.arange(width) % 2 == 1
    result = []
    for held, count, p, k, out, own, w in zip(heads, counts, pages, kept, left, vectors, wanted, strict=True):
        order = sorted(out, key=lambda name, own=own: ((own[name] != anchor).sum(), name))
        w, chosen = min(w, len(order)), set(k)
        for i in range(w):
            if pick == "grid":
                chosen.add(order[i * (len(order) - 1) // max(w - 1, 1)])
                continue
            run = order[i * len(order) // w : (i + 1) * len(order) // w]
            mean = np.mean([own[name] for name in run], axis=0)
            off = {name: round(float(np.abs(own[name] - mean).sum()), 9) for name in run}
            chosen.add(min(run, key=lambda name, off=off: (off[name], name)))
        tokens = {q for name in chosen for q in p[name]} | (protected & set(held))
        result.append(sorted(held if len(held) <= count else tokens))
    return result


UNITS = {"token": {}, "chunk": {"page": 3}, "page": {"page": 3, "side_by_side": True}}


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    ("anchor", "share", "upper", "pick", "granularity"),
    [
        ("mean", 0.25, 0.5, "centroid", "token"),
        ("mean", 0.25, 0.5, "grid", "token"),
        ("alternate", 0.6, 0.3, "centroid", "token"),
        ("mean", 0.4, 0.5, "centroid", "chunk"),
        ("mean", 0.4, 0.5, "centroid", "page"),
        ("alternate", 0.6, 0.3, "centroid", "page"),
        ("mean", 0.6, 0.3, "grid", "page"),
    ],
)
def test_is_the_literal_algorithm(anchor, share, upper, pick, granularity, aligned):
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
    part = Representatives(TopTokens(), share, anchor=anchor, pick=pick, upper=upper, granularity=granularity, page=3)
    index = np.asarray(jax.jit(part.keep, static_argnums=3)(scores, positions, counts, size))
    for row in range(rows):
        texts = [
            {int(p): float(s) for p, s in zip(positions[row, h], scores[row, h], strict=True) if p >= 0}
            for h in range(heads)
        ]
        expected = literal(texts, counts[row].tolist(), share, anchor, pick, upper, {0, 1}, **UNITS[granularity])
        got = [sorted(positions[row, h, index[row, h][index[row, h] >= 0]].tolist()) for h in range(heads)]
        assert got == expected


@pytest.mark.parametrize(("heads", "granularity"), [(2, "page"), (8, "chunk"), (14, "page")])
def test_a_prompt_is_compressed_as_algorithms_1_and_2_say(heads, granularity):
    """Groups of 1, 4 and 7; three lengths, of which the shortest is within the budget. H2O's sums, and bits by age."""
    params, rng = tiny.decoder(heads, 2), np.random.default_rng(heads)
    rows = [rng.integers(0, tiny.VOCAB, n) for n in (44, 31, 12)]
    policy = kvcrush(h2o(20, recent=5), share=0.4, granularity=granularity, page=4)
    _, cache = tiny.prefill(params, policy, rows, 48)
    for b, row in enumerate(rows):
        n = len(row)
        texts = [dict(enumerate(scores)) for scores in attended(params, row)[2]]
        units = UNITS[granularity] | {"page": 4}
        ages = n - np.arange(n)
        assert tiny.held(cache, b)[0] == literal(texts, [20, 20], 0.4, protected=range(n - 5, n), ages=ages, **units)
        assert n == 12 or sum(map(len, tiny.held(cache, b)[0])) < 40, "slots that hold no whole page"


def test_g7_of_pages():
    """The seven signatures as pages of two tokens that two heads rate: bits of tokens side by side."""
    bits = np.array(BITS).reshape(14, 2)
    part = Representatives(TopTokens(), 0.5, granularity="page", page=2)
    slots = jnp.arange(14)[None, None]
    left = jnp.arange(14)[None, None] < 7
    signatures = Signatures(jnp.asarray(bits)[None, None], slots // 2, slots % 2, width=2)
    anchor = part._anchor(signatures, left, ALL_HEADS)
    assert anchor[0, 0].ravel().tolist() == [True, True, False, False]
    marked = part.representatives(signatures, anchor, left, slots, jnp.array([[3]]), 3)
    assert np.flatnonzero(marked[0, 0]).tolist() == [0, 1, 2]


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
        ("base=snapkv,base.budget=40,share=0.02", "share=0.02 of a budget of 40 entries is less than one token"),
        ("base=kvcrush", "another base"),
        ("granularity=line", "granularity='line'.*'chunk' and 'page'"),
        ("granularity=page,page=0", "page=0"),
        ("granularity=page,pick=kmeans", "pick='kmeans' clusters tokens or chunks"),
        ("base=snapkv,base.budget=100,granularity=page", "less than one page; accepted is a share of 32 or more"),
    ],
)
def test_what_makes_no_sense(options, says):
    with pytest.raises(ValueError, match=says):
        parse(f"kvcrush:{options}")


def test_nothing_beyond_a_budget_that_covers_the_prompt():
    policy = kvcrush(snapkv(24, window=4), share=0.5)
    _, cache = tiny.prefill(tiny.decoder(), policy, [np.arange(20)], 24)
    assert tiny.held(cache, 0)[0][0] == list(range(20))

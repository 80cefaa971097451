"""KVCrush against its Algorithms 1 and 2 in plain Python, with the worked examples."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import Slots
from kvjax.mesh.heads import ALL_HEADS
from kvjax.methods.kvcrush.query_heads import Watched
from kvjax.methods.kvcrush.representatives import _cuts
from kvjax.methods.kvcrush.signatures import Signatures
from kvjax.parts import Fixed, Pages, Representatives, TopTokens
from kvjax.policies import cam, d2o, h2o, kvcrush, parse, snapkv, streaming_llm
from kvjax.policy import Policy, Ranked
from tests import tiny
from tests.methods.literal_crush import cut, literal
from tests.methods.reference import Reader, attended
from tests.products import each_once

BITS = np.array([[bit == "1" for bit in token] for token in ["1100", "0000", "1111", "1000", "0110", "1110", "0001"]])


def picked(bits, anchor, wanted, pick):
    """The representatives of one head's tokens, given their bits."""
    part = Representatives(TopTokens(), 0.5, pick=pick)
    n, counts = len(bits), jnp.array([[wanted]])

    @jax.jit
    def marked(bits, anchor):
        signatures, anchor = Signatures(bits[None, None]), anchor[None, None, None]
        there, positions = jnp.ones((1, 1, n), bool), jnp.arange(n)[None, None]
        return part.representatives(signatures, anchor, there, positions, counts, wanted)

    return np.flatnonzero(marked(bits, np.array(anchor, bool))[0, 0]).tolist()


@pytest.mark.slow(first=1)
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


@pytest.mark.parametrize(
    ("anchor", "expected"),
    [("mean", [1, 1, 0, 0]), ("alternate", [0, 1, 0, 1]), (7, jax.random.bernoulli(jax.random.key(7), shape=(4,)))],
)
def test_g7_anchors(anchor, expected):
    bits = Signatures(jnp.asarray(BITS)[None, None])
    found = Representatives(TopTokens(), 0.5, anchor=anchor)._anchor(bits, jnp.ones((1, 1, 7), bool), ALL_HEADS)
    np.testing.assert_array_equal(found[0, 0, 0], expected)


@pytest.mark.slow
def test_k_means_finds_clusters_that_are_apart():
    """Runs of three do not separate four tokens from two, clusters do: the middle of four, the earlier of two."""
    tokens = ["111100", "111000", "110000", "111010", "000111", "000011"]
    bits = np.array([[bit == "1" for bit in token] for token in tokens])
    assert picked(bits, [1, 1, 1, 0, 0, 0], 2, "kmeans") == [1, 4]
    assert picked(bits, [1, 1, 1, 0, 0, 0], 2, "centroid") == [1, 5]


keep = jax.jit(lambda part, *rest: part.keep(Ranked(*rest)), static_argnums=(0, 4))
UNITS = {"token": {}, "chunk": {"page": 3}, "page": {"page": 3, "side_by_side": True}}


def drawn(aligned, heads=5):
    """Scores, positions and counts of three rows; two tokens are protected, and budgets differ by head."""
    rng = np.random.default_rng(3)
    rows, size, slots = 3, 20, 40
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
    return scores, positions, rng.integers(8, size + 1, (rows, heads)), size


def texts_of(scores, positions, row):
    """{position: score} of each head of a row."""
    return [
        {int(p): float(s) for p, s in zip(*head, strict=True) if p >= 0}
        for head in zip(positions[row], scores[row], strict=True)
    ]


def retained(index, positions, row):
    """The positions that each head of a row retains."""
    pairs = zip(positions[row], np.asarray(index)[row], strict=True)
    return [sorted(own[index[index >= 0]].tolist()) for own, index in pairs]


@pytest.mark.slow(first=1)  # test_bits_by_age has pages, and test_bits_of_query_heads those of slots in any order
@pytest.mark.parametrize(
    ("anchor", "share", "upper", "pick", "granularity", "aligned"),
    each_once(
        [
            ("mean", 0.4, 0.5, "kmeans", "token"),
            ("mean", 0.4, 0.5, "centroid", "page"),
            ("mean", 0.25, 0.5, "centroid", "token"),
            ("mean", 0.25, 0.5, "grid", "token"),
            ("alternate", 0.6, 0.3, "centroid", "token"),
            ("mean", 0.25, 0.0, "centroid", "token"),
            (7, 0.4, 0.5, "centroid", "token"),
            ("mean", 0.4, 0.5, "centroid", "chunk"),
            ("alternate", 0.6, 0.5, "kmeans", "chunk"),
            ("alternate", 0.6, 0.3, "centroid", "page"),
            (7, 0.6, 0.0, "centroid", "page"),
            ("mean", 0.6, 0.3, "grid", "page"),
        ],
        [False, True],
    ),
)
def test_is_the_literal_algorithm(anchor, share, upper, pick, granularity, aligned):
    """Three rows of different lengths, five heads with budgets of their own, slots with different tokens."""
    scores, positions, counts, size = drawn(aligned)
    part = Representatives(TopTokens(), share, anchor=anchor, pick=pick, upper=upper, granularity=granularity, page=3)
    index = keep(part, scores, positions, counts, size)
    if isinstance(anchor, int):
        width = 5 * (3 if granularity == "page" else 1)
        anchor = np.asarray(jax.random.bernoulli(jax.random.key(anchor), shape=(width,)))
        assert 0 < anchor.sum() < width
    compared = 0
    for row in range(3):
        texts, own = texts_of(scores, positions, row), counts[row].tolist()
        expected = literal(texts, own, share, anchor, pick, upper, {0, 1}, **UNITS[granularity])
        for got, wanted in zip(retained(index, positions, row), expected, strict=True):
            compared += wanted is not None
            assert wanted is None or got == wanted
    assert compared >= (7 if pick == "kmeans" else 15)


def test_ranks_of_representatives_are_exact_without_their_product():
    """Of a head of many entries; 2^16 representatives and more are refused."""
    n, parts = np.array([[2**30 + 5, 7]]), np.array([[2**15 + 1, 3]])
    found = _cuts(jnp.asarray(n), jnp.asarray(parts), 4)
    np.testing.assert_array_equal(found, np.arange(4) * n[..., None] // parts[..., None])
    with pytest.raises(ValueError, match="65536 representatives per head: expected fewer than 65536"):
        _cuts(jnp.asarray(n), jnp.asarray(parts), 2**16)


@pytest.mark.parametrize("granularity", UNITS)
def test_bits_by_age(granularity):
    """A token's score is divided by the number of queries that saw it: 1 for the newest."""
    scores, positions, counts, size = drawn(aligned=True)
    part = Representatives(TopTokens(), 0.4, by_age=True, granularity=granularity, page=3)
    index = keep(part, scores, positions, counts, size)
    for row, length in enumerate((40, 23, 9)):
        texts, ages = texts_of(scores, positions, row), length - np.arange(length)
        units = UNITS[granularity]
        expected = literal(texts, counts[row].tolist(), 0.4, protected={0, 1}, ages=ages, **units)
        assert retained(index, positions, row) == expected


@partial(jax.jit, static_argnums=(0, 4))
def keep_by_query_heads(part, scores, positions, counts, size, own):
    ages = jnp.max(positions, axis=-1, keepdims=True) + 1 - positions
    received = own.reshape(*positions.shape[:2], -1, positions.shape[2]) * ages[:, :, None]
    entries = Slots(None, None, positions, counts, Watched(received, None))
    return part.keep(Ranked(scores, positions, counts, size, entries=entries))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("upper", "granularity", "aligned"),
    each_once([(0.3, "page"), (0.5, "token"), (0.0, "token"), (0.5, "chunk")], [False, True]),
)
def test_bits_of_query_heads(upper, granularity, aligned):
    """Three query heads to each kv head, with scores of their own for the tokens of their kv head."""
    scores, positions, counts, size = drawn(aligned)
    own = np.random.default_rng(4).gamma(1, size=(3, 15, 40)).astype(np.float32)
    part = Representatives(TopTokens(), 0.4, upper=upper, granularity=granularity, page=3, bits="query")
    index = keep_by_query_heads(part, scores, positions, counts, size, own)
    for row in range(3):
        queries = [[texts_of(own[:, g::3], positions, row)[h] for g in range(3)] for h in range(5)]
        expected = literal(
            texts_of(scores, positions, row),
            counts[row].tolist(),
            0.4,
            upper=upper,
            protected={0, 1},
            queries=queries,
            **UNITS[granularity],
        )
        assert retained(index, positions, row) == expected


@pytest.mark.parametrize("aligned", [True, False])
def test_pages_without_representatives(aligned):
    """The baseline of Figures 5 and 6: protected tokens, and the whole pages with the highest mean scores."""
    scores, positions, counts, size = drawn(aligned)
    index = keep(Pages(TopTokens(), 3), scores, positions, counts, size)
    for row in range(3):
        for held, count, got in zip(
            texts_of(scores, positions, row), counts[row], retained(index, positions, row), strict=True
        ):
            pages = cut(held, {0, 1}, 3)
            mean = {name: np.mean([np.float32(held[p]) for p in pages[name]]) for name in pages}
            own = [p for p in held if p < 2]
            best = sorted(pages, key=lambda name: (-mean[name], name))[: (count - len(own)) // 3]
            assert got == sorted(held if len(held) <= count else [*own, *(p for name in best for p in pages[name])])
    assert kvcrush(h2o(96), share=0.0, granularity="page").select == Pages(TopTokens(), 32)
    assert kvcrush(h2o(96), share=0.0, granularity="chunk", page=16).select == Pages(TopTokens(), 16)
    with pytest.raises(ValueError, match=r"^kvcrush: granularity='pages': expected 'token' or 'chunk' or 'page'"):
        kvcrush(h2o(96), share=0.0, granularity="pages")


def test_figure_6_by_hand():
    """672 entries: 32 initial and 128 recent tokens, and the 16 pages of 32 with the highest mean scores."""
    rng, n = np.random.default_rng(5), 1024
    policy = parse("kvcrush:base=h2o,base.budget=672,base.recent=128,base.sinks=32,share=0.0,granularity=page,page=32")
    scores = rng.gamma(1, size=(1, 1, n)).astype(np.float32)
    positions = np.arange(n)[None, None]
    raised = np.where((positions < 32) | (positions >= n - 128), np.inf, scores)
    index = keep(policy.select, raised, positions, np.array([[672]]), 672)
    best = 1 + np.argsort(-scores[0, 0, 32 : n - 128].reshape(-1, 32).mean(axis=1))[:16]
    expected = [p for p in range(n) if p < 32 or p >= n - 128 or p // 32 in best]
    assert np.asarray(index)[0, 0].tolist() == expected
    assert len(expected) == 672


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("heads", "granularity"), [(2, "page"), (8, "chunk"), (14, "page")])
def test_a_prompt_is_compressed_as_algorithms_1_and_2_say(heads, granularity):
    """Groups of 1, 4 and 7, and three lengths; the shortest is within the budget. H2O's sums, and bits by age."""
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
        assert n == 12 or sum(map(len, tiny.held(cache, b)[0])) < 40, "slots that hold no page"


def test_g7_of_pages():
    """The seven signatures as pages of two tokens with bits of two heads: the bits of tokens lie side by side."""
    bits = np.array(BITS).reshape(14, 2)
    part = Representatives(TopTokens(), 0.5, granularity="page", page=2)
    slots = jnp.arange(14)[None, None]
    left = jnp.arange(14)[None, None] < 7
    signatures = Signatures(jnp.asarray(bits)[None, None], slots // 2, slots % 2, width=2)
    anchor = part._anchor(signatures, left, ALL_HEADS)
    assert anchor[0, 0].ravel().tolist() == [True, True, False, False]
    marked = part.representatives(signatures, anchor, left, slots, jnp.array([[3]]), 3)
    assert np.flatnonzero(marked[0, 0]).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("config", "representatives"), [("table2_gsm8k", 384), ("figure3_kmeans", 128), ("figure6_pages", 128)]
)
def test_the_split_of_the_lm_eval_settings(config, representatives):
    """Table 1: 672 entries are 32 initial, 512 middle and 128 recent ones; Table 2 splits the middle 128 to 384."""
    script = (Path(__file__).parents[2] / "configs" / "kvcrush" / f"{config}.sh").read_text()
    base = re.search(r'^base="(.*)"$', script, re.MULTILINE)[1]
    texts = [
        text.replace("$base", base).replace(";", ",") for text in re.findall(r'^    "(.*?)"', script, re.MULTILINE)
    ]
    crushed = [policy for policy in map(parse, texts) if isinstance(policy.select, Representatives)]
    for policy in crushed:
        assert policy.budget == Fixed(672)
        assert (policy.protect.sinks, policy.protect.recent) == (32, 128)
        assert int(Fraction(str(policy.select.share)) * 672) == representatives
        assert policy.select.by_age
    pages = [policy.select for policy in map(parse, texts) if isinstance(policy.select, Pages)]
    assert pages == ([Pages(TopTokens(), 32)] if config == "figure6_pages" else [])
    assert len(crushed) == {"table2_gsm8k": 3, "figure3_kmeans": 2, "figure6_pages": 1}[config]


def window_scores_of(params, row, window, group):
    """What SnapKV's window gives to the tokens before it, in the mean over its queries: [H, G, N - W]."""
    reader, n = Reader(params), len(row)
    reader.read(row)
    return reader.weights(range(n - window, n), range(n - window))[0].mean(axis=2)


@pytest.mark.slow
def test_on_snapkv_a_prompt_is_compressed_as_algorithms_1_and_2_say():
    """The window is protected; bits are by the window's scores, not by age."""
    params, rng = tiny.decoder(8, 4), np.random.default_rng(11)
    rows = [rng.integers(0, tiny.VOCAB, n) for n in (44, 31)]
    policy = kvcrush(snapkv(20, window=4, pool="none"), share=0.4)
    _, cache = tiny.prefill(params, policy, rows, 48)
    for b, row in enumerate(rows):
        n = len(row)
        scores = window_scores_of(params, row, 4, 2).mean(axis=1)
        texts = [dict(enumerate(own)) | dict.fromkeys(range(n - 4, n), np.inf) for own in scores]
        assert tiny.held(cache, b)[0] == literal(texts, [20] * 4, 0.4, protected=range(n - 4, n))


@pytest.mark.parametrize("base", [h2o(64), cam(64), d2o(64, layer_budgets=False)], ids=["h2o", "cam", "d2o"])
def test_scores_that_accumulate_are_compared_by_age(base):
    assert kvcrush(base).select.by_age
    assert not kvcrush(snapkv(64)).select.by_age


@pytest.mark.slow
def test_nothing_beyond_a_budget_that_covers_the_prompt():
    policy = kvcrush(snapkv(24, window=4), share=0.5)
    _, cache = tiny.prefill(tiny.decoder(), policy, [np.arange(20)], 24)
    assert tiny.held(cache, 0)[0][0] == list(range(20))


def test_a_score_without_query_heads_is_refused():
    base = streaming_llm(64)
    select = Representatives(TopTokens(), 0.25, bits="query")
    with pytest.raises(ValueError, match="the score Recency has no scores of single query heads"):
        Policy(base.score, Fixed(64), select, base.merge)

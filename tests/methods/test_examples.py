"""Worked examples: attention weights that can be added up by hand, and the tokens that are retained.

Token p has the unit vector e_p for a key and nothing is rotated, so a query of logarithms attends with exactly the
weights whose logarithms they are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attend import Reading, Stepping
from kvjax.cache import Layers, Slots
from kvjax.kv_cache import KVCache
from kvjax.models import AttentionLayer, DecoderConfig, Rope
from kvjax.models.rope import NO_ROPE
from kvjax.pallas_kernels import Reduction, window_scores
from kvjax.parts import Pooling, TopTokens, WindowAttention
from kvjax.policies import h2o, morphkv, streaming_llm, tova
from kvjax.policy import Moment, Policy, Ranked
from kvjax.reading.room import plan_read

DIM = 8  # tokens that there can be


def query(weights) -> np.ndarray:
    """[DIM] logits of the given weights by position."""
    logits = np.full(DIM, -1e4, np.float32)
    weights = np.asarray(weights, np.float32)
    logits[: len(weights)][weights > 0] = np.log(weights[weights > 0])
    return logits


def key(position: int) -> np.ndarray:
    return np.eye(DIM, dtype=np.float32)[position]


@partial(jax.jit, static_argnames=("policy", "compress"))
def read(policy: Policy, compress: bool, q, k) -> Slots:
    """The entries of a layer after a prompt, q [Hq, N, DIM] and k [N, DIM]."""
    heads, n = q.shape[:2]
    config = DecoderConfig("llama", 1, 1, 1, heads, 1, DIM, (None,), Rope(1e4), DIM)
    lengths = jnp.array([n])
    cache = KVCache.empty(config, policy, lengths, n, jnp.float32)
    plan = plan_read(cache, [0], new=n, room=0, compress=compress, final=False)
    attend = Reading(policy, policy.limits(1), plan)(jnp.arange(n)[None], lengths, lengths)
    return attend(layer(heads), q[None], k[None, None], k[None, None], cache.entries)[1][0]


@partial(jax.jit, static_argnames="policy")
def step(policy: Policy, position, entries: Slots, q, k) -> Slots:
    """The entries after one more token, q [Hq, DIM] and k [DIM]."""
    attend = Stepping(policy, policy.limits(1))(position[None], jnp.array([True]))
    k = k[None, None, None]
    return attend(layer(len(q)), q[None, :, None], k, k, Layers((entries,)))[1][0]


@partial(jax.jit, static_argnames=("policy", "heads"))
def scored(policy: Policy, heads: int, position, entries: Slots):
    return policy.score(entries, Moment(position[None], layer(heads)))[0, 0]


def layer(heads: int) -> AttentionLayer:
    return AttentionLayer(0, NO_ROPE, None, 1.0, jnp.zeros((heads, DIM, 1)))


class Text:
    """One layer with one kv head that reads a prompt and decodes. `rows[t]` has token t's attention weights."""

    def __init__(self, policy: Policy, rows, *, heads: int = 1, compress: bool = True, logits: bool = False):
        self.policy, self.heads = policy, heads
        q = np.stack([np.stack(row) if logits else np.stack([query(row)] * heads) for row in rows], axis=1)
        self.entries = read(policy, compress, q, np.stack([key(p) for p in range(len(rows))]))
        self.next = len(rows)

    def decode(self, row) -> None:
        q = np.stack([query(row)] * self.heads)
        self.entries = step(self.policy, np.int32(self.next), self.entries, q, key(self.next))
        self.next += 1

    @property
    def positions(self) -> list[int]:
        return self.entries.positions[0, 0].tolist()

    @property
    def scores(self) -> np.ndarray:
        """The scores by slot before the next token comes in."""
        return np.asarray(scored(self.policy, self.heads, np.int32(self.next), self.entries))


ANY = [1.0]  # a row that no policy asks about


@pytest.mark.parametrize(("fusion", "importance"), [("sum", [0.10, 0.60]), ("max", [0.05, 0.30])])
def test_g1_morphkv_figure_5(fusion, importance):
    """C = 2, R = 2. me, today's | weather, The: both have weighed [me, today's] with [.05, .30], so *me* must go."""
    policy = morphkv(budget=4, window=2, fusion=fusion)
    text = Text(policy, [ANY, ANY, [0.05, 0.30, 0.65], [0.05, 0.30, 0.25, 0.40]])
    np.testing.assert_allclose(text.scores[:2], importance, rtol=1e-6)
    text.decode([0, 0.2, 0.2, 0.2, 0.4])
    assert sorted(text.positions) == [1, 2, 3, 4]


@pytest.mark.parametrize(("fusion", "importance", "kept"), [("sum", [0.40, 0.35], 0), ("max", [0.20, 0.35], 1)])
def test_g1_fusions_disagree(fusion, importance, kept):
    policy = morphkv(budget=4, window=2, fusion=fusion)
    text = Text(policy, [ANY, ANY, [0.20, 0, 0.80], [0.20, 0.35, 0.20, 0.25]])
    np.testing.assert_allclose(text.scores[:2], importance, atol=1e-6)
    text.decode(ANY)
    assert sorted(text.positions) == [kept, 2, 3, 4]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("options", "importance", "kept"),
    [
        ({}, [0.085073, 0.683757, 0.267717], 1),
        ({"normalise": "distant", "group": "logits"}, [0.229124, 0.207320, 0.563555], 2),
        ({"normalise": "distant", "group": "max"}, [0.725731, 0.705385, 0.259496], 0),
    ],
    ids=["paper", "llama", "mistral"],
)
def test_g2_morphkv_group_rules(options, importance, kept):
    """Two query heads, one window row, logits over three distant tokens and itself: each rule retains another one."""
    row = [np.pad(np.float32(logits), (0, DIM - 4)) for logits in ([3.1, 0, 2, 6], [0, 3, 2, 0])]
    rows = [[query(ANY)] * 2] * 3 + [row]
    policy = morphkv(budget=2, window=1, **options)
    whole = Text(policy, rows, heads=2, compress=False, logits=True)
    np.testing.assert_allclose(whole.scores[:3], importance, atol=1e-6)
    assert Text(policy, rows, heads=2, logits=True).positions == [kept, 3]


def test_g3_morphkv_slot_by_slot():
    """4 slots, R = 2, sum. The token coming in overwrites the victim's slot; token 0 survives as a natural sink."""
    text = Text(morphkv(budget=4, window=2), [ANY, ANY, [0.5, 0.3, 0.2], [0.4, 0.1, 0.3, 0.2]])
    assert text.positions == [0, 1, 2, 3]
    np.testing.assert_allclose(text.scores[[0, 1]], [0.9, 0.4], rtol=1e-6)
    text.decode([0.3, 0, 0.1, 0.2, 0.4])
    assert text.positions == [0, 4, 2, 3]
    np.testing.assert_allclose(text.scores[[0, 2]], [0.7, 0.4], rtol=1e-6)
    text.decode([0.25, 0, 0, 0.2, 0.25, 0.3])
    assert text.positions == [0, 4, 5, 3]
    np.testing.assert_allclose(text.scores[[0, 3]], [0.55, 0.4], rtol=1e-6)
    text.decode(ANY)
    assert text.positions == [0, 4, 5, 6]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("fusion", "importance"), [("sum", [0.75, 0.15, 0.27, 0.23]), ("max", [0.40, 0.10, 0.22, 0.20])]
)
def test_g3b_morphkv_prompt(fusion, importance):
    """R = 2. Two distant tokens of four are retained of the prompt; four slots leave one of them when token 6 is in."""
    rows = [ANY] * 4 + [[0.40, 0.05, 0.22, 0.03, 0.30], [0.35, 0.10, 0.05, 0.20, 0.10, 0.20]]
    policy = morphkv(budget=4, window=2, fusion=fusion)
    np.testing.assert_allclose(Text(policy, rows, compress=False).scores[:4], importance, rtol=1e-6)
    text = Text(policy, rows)
    assert text.positions == [0, 2, 4, 5]
    text.decode(ANY)
    assert sorted(text.positions) == [0, 4, 5, 6]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("normalise", "importance", "kept"), [("full", [0.218, 0.252], 1), ("distant", [1.344, 0.656], 0)]
)
def test_g3c_normalisation_flips_the_victim(normalise, importance, kept):
    rows = [ANY, ANY, [0.018, 0.002, 0.98], [0.20, 0.25, 0.25, 0.30]]
    text = Text(morphkv(budget=4, window=2, normalise=normalise), rows)
    np.testing.assert_allclose(text.scores[:2], importance, atol=6e-4)
    text.decode(ANY)
    assert sorted(text.positions) == [kept, 2, 3, 4]


@partial(jax.jit, static_argnums=0)
def pooled(pooling: Pooling, scores, eligible):
    return pooling(scores, eligible)


SCORES = np.array([[[0, 0, 0.9, 0, 0, 0, 0.3, 0.3, 0.3, 0]]], np.float32)


def test_g9_importance_is_what_a_column_receives():
    """All rows have the same sum and the same mean; the sums of columns differ by token."""
    rows = np.array([[1, 0, 0, 0], [0.7, 0.3, 0, 0], [0.6, 0.1, 0.3, 0], [0.5, 0.1, 0.2, 0.2]])
    np.testing.assert_allclose(rows.mean(axis=1), 0.25)
    at = np.arange(4)[None]
    q, k = (np.stack(list(map(make, what)))[None, None] for make, what in ((query, rows), (key, range(4))))

    @partial(jax.jit, static_argnums=0)
    def received(how):
        lse = np.zeros((1, 1, 4), np.float32)
        return window_scores(q, k, at, at[:, None], scale=1.0, lse=lse, reduction=Reduction(rows=how))[0, 0]

    np.testing.assert_allclose(received("sum") / 4, [0.7, 0.125, 0.125, 0.05], rtol=1e-6)
    np.testing.assert_allclose(received("mean"), [0.7, 0.5 / 3, 0.25, 0.2], rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected", "top"),
    [
        ("avg", [0, 0.3, 0.3, 0.3, 0, 0.1, 0.2, 0.3, 0.2, 0.1], [1, 2, 3, 7]),
        ("max", [0, 0.9, 0.9, 0.9, 0, 0.3, 0.3, 0.3, 0.3, 0.3], [1, 2, 3, 5]),
    ],
)
def test_g10_pooling(kind, expected, top):
    got = pooled(Pooling(kind, 3), SCORES, np.ones_like(SCORES, bool))
    np.testing.assert_allclose(got[0, 0], expected, atol=1e-7)
    kept = TopTokens().keep(Ranked(np.round(got, 4), np.arange(10)[None, None], np.array([[4]]), 4))
    assert kept.tolist() == [[top]]


def test_g10_pooling_at_the_edge():
    one = np.eye(1, 5, dtype=np.float32)[None]
    got = pooled(Pooling("avg", 5), one, np.ones_like(one, bool))
    np.testing.assert_allclose(got[0, 0], [0.2, 0.2, 0.2, 0, 0], atol=1e-7)


def test_g10_padding_and_the_window_are_no_neighbours():
    """Four columns of padding before and the window after the eligible ones do not change what is pooled."""
    padded = np.pad(SCORES, ((0, 0), (0, 0), (4, 3)), constant_values=7.0)
    eligible = np.pad(np.ones_like(SCORES, bool), ((0, 0), (0, 0), (4, 3)))
    for pool in (Pooling("avg", 3), Pooling("max", 5)):
        alone = pooled(pool, SCORES, np.ones_like(SCORES, bool))
        np.testing.assert_array_equal(pooled(pool, padded, eligible)[..., 4:-3], alone)


G12 = [[1], [0.6, 0.4], [0.5, 0.1, 0.4], [0.1, 0.1, 0.6, 0.2], [0.1, 0.05, 0.15, 0.4, 0.3]]


def test_g12_h2o():
    """Columns sum to [2.3, .65, 1.15, .6, .3]; one heavy hitter and two recent tokens."""
    policy = h2o(budget=3, recent=2)
    np.testing.assert_allclose(Text(policy, G12, compress=False).scores, [2.3, 0.65, 1.15, 0.6, 0.3], rtol=1e-6)
    text = Text(policy, G12)
    assert text.positions == [0, 3, 4]
    text.decode([0.2, 0, 0, 0.5, 0.2, 0.1])  # 0 is the only one unprotected
    assert sorted(text.positions) == [3, 4, 5]
    order = np.argsort(text.positions)
    np.testing.assert_allclose(text.scores[order], [0.6 + 0.5 / 0.8, 0.3 + 0.2 / 0.8, 0.1 / 0.8], rtol=1e-6)


def test_g12_tova():
    text = Text(tova(budget=3), G12)
    assert text.positions == [2, 3, 4]
    text.decode([0, 0, 0, 0.1, 0.6, 0.3])  # the last query liked 2 least
    assert sorted(text.positions) == [3, 4, 5]
    text.decode([0, 0, 0, 0, 0.1, 0.6, 0.3])
    assert sorted(text.positions) == [4, 5, 6]


@pytest.mark.parametrize("positions", ["original", "in_cache"])
def test_g12_streaming_llm(positions):
    text = Text(streaming_llm(budget=3, sinks=1, positions=positions), G12)
    assert text.positions == [0, 3, 4]
    text.decode(ANY)
    assert sorted(text.positions) == [0, 4, 5]


def test_a_window_s_votes_are_of_its_own_queries_only():
    """A prompt of four tokens is read as 3 + 1, and the ring of two queries then has those of rows 2 and 3."""
    score = WindowAttention(2, Reduction(rows="sum", group="sum"))
    policy = replace(morphkv(budget=4, window=2), score=score)
    text = Text(policy, [ANY, ANY, [0.5, 0.3, 0.2]], compress=False)
    text.entries = text.entries.grow(4)
    text.decode([0.4, 0.1, 0.3, 0.2])
    np.testing.assert_allclose(text.scores[:2], [0.9, 0.4], rtol=1e-6)

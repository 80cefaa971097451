"""D2O against its equations, in float64 NumPy: dictionaries of tokens, one head and one token after another."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.cache import UNLIMITED, Slots
from kvjax.mesh.heads import ALL_HEADS
from kvjax.models import AttentionLayer, Rope
from kvjax.pallas_kernels import PAGE
from kvjax.parts import AccumulatedAttention, Fixed, Fraction, SimilarityMerge, TopTokens, VarianceShares
from kvjax.policy import LayerShape, Moment, Policy
from tests import tiny
from tests.methods.reference import Reader, _unrotated, attended, rotated, softmax


class Layer:
    """All kv heads of a layer of one text: in each, position -> [rotated key, value, attention received]."""

    def __init__(self, heads, *, budget, sinks, recent, weights="paper", every=1):
        self.heads = [{} for _ in range(heads)]
        self.budget, self.sinks, self.recent, self.weights, self.every = budget, sinks, recent, weights, every
        self.tau = -np.inf
        self.merges = []  # whether each i-th entry that the heads evicted was merged

    def evict(self, now, count):
        """Merges or drops the `count` entries of each head with the lowest scores that are not protected."""
        lost, rest = [], []
        for head in self.heads:
            free = [p for p in sorted(head) if self.sinks <= p < now - self.recent]
            worst = sorted(free, key=lambda p, head=head: head[p][2])[:count]
            lost.append([head.pop(p) for p in sorted(worst)])
            keys = np.stack([head[p][0] / np.linalg.norm(head[p][0]) for p in sorted(head)])
            cosines = np.stack([keys @ key / np.linalg.norm(key) for key, _, _ in lost[-1]])
            rest.append((cosines.max(axis=1), [sorted(head)[i] for i in cosines.argmax(axis=1)]))
        u = np.stack([best for best, _ in rest])  # [H, count]
        mean = u.mean(axis=0)
        self.tau = mean.mean() if self.tau == -np.inf else 0.5 * self.tau + 0.5 * mean.mean()
        assert all(m == self.tau or abs(m - self.tau) > 2e-5 for m in mean)
        merged = mean >= self.tau
        self.merges += merged.tolist()
        for head, own, best, (_, targets) in zip(self.heads, lost, u, rest, strict=True):
            for target in set(targets):
                mine = [i for i in range(count) if merged[i] and targets[i] == target]
                for part in (0, 1) if mine else ():
                    if self.weights == "paper":
                        e = [np.exp(best[i]) for i in mine]
                        new = np.e * head[target][part] + sum(w * own[i][part] for w, i in zip(e, mine, strict=True))
                        head[target][part] = new / (np.e + sum(e))
                    else:
                        new = head[target][part] + sum(best[i] * own[i][part] for i in mine)
                        head[target][part] = new / (1 + len(mine))

    def read(self, k, v, received):
        for head, *rows in zip(self.heads, k, v, received, strict=True):
            head.update({t: [key, value, score] for t, (key, value, score) in enumerate(zip(*rows, strict=True))})
        if k.shape[1] > self.budget:
            self.evict(k.shape[1], k.shape[1] - self.budget)

    def decode(self, t, q, k, v):
        """One token: q [H, G, D], k and v [H, D], before RoPE."""
        if len(self.heads[0]) >= self.budget:
            self.evict(t, self.every)
        for head, query, key, value in zip(self.heads, q, k, v, strict=True):
            head[t] = [rotated(key, t, 1e4), value, 0.0]
            keys = np.stack([head[p][0] for p in sorted(head)])
            weights = softmax(rotated(query, t, 1e4) @ keys.T / np.sqrt(len(key))).mean(axis=0)
            for p, weight in zip(sorted(head), weights, strict=True):
                head[p][2] += weight


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "weights", "options"),
    [(4, 4, "paper", {"recent": 6}), (8, 2, "code", {"recent": 3, "every": 3})],
)
def test_against_the_equations(heads, kv_heads, weights, options):
    """Prompts of different lengths, one within the budget, and a few steps: every key, value, score and threshold."""
    rng = np.random.default_rng(8)
    rows, more = [rng.integers(0, tiny.VOCAB, n) for n in (40, 11, 23)], rng.integers(0, tiny.VOCAB, (9, 3))
    params = tiny.decoder(heads, kv_heads)
    policy = policies.d2o(budget=14, sinks=2, layer_budgets=False, merge=SimilarityMerge(weights), **options)
    _, cache = tiny.prefill(params, policy, rows, 48)
    texts = [np.append(row, tokens) for row, tokens in zip(rows, more.T, strict=True)]
    projected = []
    for text in texts:
        q, k, v = (
            np.asarray(x[0, :, : len(text)], np.float64)
            for x in _unrotated(params, np.pad(text, (0, 56 - len(text)))[None])
        )
        projected.append((q.reshape(kv_heads, -1, *q.shape[1:]), k, v))
    layers = [Layer(kv_heads, budget=14, sinks=2, weights=weights, **options) for _ in rows]
    for layer, row in zip(layers, rows, strict=True):
        layer.read(*attended(params, row))
    check(cache, layers)
    for step, token in enumerate(more):
        _, cache = tiny.step(params, cache, token, np.ones(3, bool))
        for layer, row, (q, k, v) in zip(layers, rows, projected, strict=True):
            t = len(row) + step
            layer.decode(t, q[:, :, t], k[:, t], v[:, t])
        check(cache, layers)
    assert {merged for layer in layers for merged in layer.merges} == {True, False}


def check(cache, layers):
    entries = jax.tree.map(np.asarray, cache.entries[0])
    for b, layer in enumerate(layers):
        np.testing.assert_allclose(entries.merging[b], layer.tau, atol=1e-5)
        for h, head in enumerate(layer.heads):
            slot = {int(p): s for s, p in enumerate(entries.positions[b, h]) if p >= 0}
            assert sorted(slot) == sorted(head)
            for position, (key, value, score) in head.items():
                np.testing.assert_allclose(entries.keys[b, h, slot[position]], key, atol=1e-5)
                np.testing.assert_allclose(entries.values[b, h, slot[position]], value, atol=1e-5)
                np.testing.assert_allclose(entries.per_slot[b, h, slot[position]], score, atol=1e-4)


@partial(jax.jit, static_argnames=("merge", "count"))
def absorbed(merge, entries, lost, count):
    moment = Moment(jnp.zeros(len(lost), int), AttentionLayer(0, Rope(1e4), None, 1.0, jnp.zeros(0)))
    return merge.absorb(entries, moment, jnp.zeros(lost.shape), lost, count)[0]


@pytest.mark.parametrize(("alpha", "beta", "moved"), [(0.5, 0.5, 0.675), (0.25, 0.75, 0.6375)])
def test_e3(alpha, beta, moved):
    """u = (.9, .6): tau is .75, then alpha .75 + beta .6; the released merge makes 2 and 1 into 1.45."""
    merge = SimilarityMerge("code", alpha=alpha, beta=beta)
    keys = jnp.array([[0.9, 0.19**0.5], [1, 0], [0.6, 0.8], [-0.6, -0.8]])[None, None]
    values = jnp.array([1.0, 2.0, 7.0, 9.0])[None, None, :, None]
    unset = merge.init(LayerShape(1, 1, 1, 2, jnp.float32, 2))
    first = Slots(keys, values, jnp.arange(4)[None, None], jnp.full((1, 1), 4), merging=unset)
    out = absorbed(merge, first, jnp.array([[[True, False, True, False]]]), count=2)
    np.testing.assert_allclose(out.merging, 0.75, rtol=1e-6)
    np.testing.assert_allclose(out.values[0, 0, [1, 3], 0], [1.45, 9], rtol=1e-6)
    np.testing.assert_allclose(out.keys[0, 0, 1], [(1 + 0.81) / 2, 0.45 * 0.19**0.5], rtol=1e-6)
    second = replace(first, positions=first.positions.at[0, 0, 0].set(-1), merging=out.merging)
    out = absorbed(merge, second, jnp.array([[[False, False, True, False]]]), count=2)
    np.testing.assert_allclose(out.merging, moved, rtol=1e-6)
    np.testing.assert_array_equal(out.values, values)  # .6 is below it
    nothing = absorbed(merge, second, jnp.zeros((1, 1, 4), bool), count=2)
    np.testing.assert_array_equal(nothing.merging, second.merging)


def test_paper_weights_by_hand():
    """Two entries that go into one: (e v_c + e^.9 v_0 + e^.6 v_2) / (e + e^.9 + e^.6)."""
    keys = jnp.array([[0.9, 0.19**0.5], [1, 0], [0.6, 0.8]])[None, None]
    values = jnp.array([1.0, 2.0, 7.0])[None, None, :, None]
    entries = Slots(keys, values, jnp.arange(3)[None, None], jnp.full((1, 1), 4), merging=jnp.zeros((1, 1)))
    out = absorbed(SimilarityMerge(), entries, jnp.array([[[True, False, True]]]), count=2)
    weights = np.exp([0.9, 1, 0.6])
    np.testing.assert_allclose(out.values[0, 0, 1, 0], weights @ [1, 2, 7] / weights.sum(), rtol=1e-6)


def literal_counts(scores, lengths, mean, least, dense):
    """Entries of each layer of one row, from scores [L, H, N]."""
    x = []
    for layer in scores:
        v = layer[:, :lengths].var(axis=1)
        x.append(((v - v.min()) / (v.max() - v.min())).mean())
    compressed = [i for i in range(len(scores)) if i not in dense]
    e = np.exp(-np.array(x)[compressed])
    ratios = e / e.sum() * len(compressed) * mean / lengths
    floor = max(0.01, least / lengths)
    wanted = np.clip(ratios, floor, 1) * lengths
    over = max(0, wanted.sum() - len(compressed) * mean)
    wanted = wanted - over * (wanted - floor * lengths) / (wanted - floor * lengths).sum()
    counts = np.floor(wanted)
    left = round(wanted.sum()) - int(counts.sum())
    for i in np.argsort(-(wanted - counts), kind="stable")[:left]:
        counts[i] += 1
    by_layer = np.full(len(scores), UNLIMITED)
    by_layer[compressed] = counts
    return by_layer


@pytest.mark.parametrize(("mean", "least"), [(40, 10), (14, 11), (290, 10)])
def test_shares_follow_the_variance(mean, least):
    """With room, with most layers at their least, and with layers that retain all of the prompt."""
    rng = np.random.default_rng(0)
    scores = (rng.gamma(1, size=(9, 2, 4, 300)) ** rng.uniform(0.5, 4, (9, 2, 4, 1))).astype(np.float32)
    lengths = np.array([300, 297])
    padded = np.where(np.arange(300) < lengths[:, None, None], scores, -np.inf)
    shares = VarianceShares(Fixed(mean))
    assert shares.entries([mean] * 9, [300] * 9, heads=4) == 4 * (3 * 300 + 6 * mean)
    assert shares.entries([mean] * 9, [7] + [300] * 8, heads=4) == 4 * (7 + 2 * 300 + 6 * mean)
    allocate = jax.jit(shares.allocate, static_argnums=(2, 3))
    counts = np.asarray(allocate(padded, np.full((9, 2), mean), least, ALL_HEADS))
    for b, length in enumerate(lengths):
        expected = literal_counts(scores[:, b].astype(np.float64), length, mean, least, (0, 1, 8))
        assert counts[:, b].tolist() == [[n] * 4 for n in expected]
        compressed = counts[2:8, b, 0]
        assert compressed.sum() <= 6 * mean
        assert compressed.sum() == 6 * mean or compressed.max() == length
        assert len(set(compressed)) > 1


LAYERS, NEW = 3, 14
RNG = np.random.default_rng(2)
ROWS = [RNG.integers(0, tiny.VOCAB, n).tolist() for n in (40, 61, 7, 23)]
TEXT = "d2o:budget=16,dense_first=1,dense_last=0"


def params():
    return tiny.decoder(8, 4, (None,) * LAYERS)


@cache
def answered():
    return kvjax.generate(params(), ROWS, policy=TEXT, max_new_tokens=NEW, log_probs=True)


@pytest.mark.slow
def test_layers_retain_their_shares():
    """After the prompt and to the end of an answer. Dense layers retain everything; bytes are those planned."""
    policy, answer = policies.parse(TEXT), answered()
    plan = kvjax.plan_cache(params().config, policy, batch=4, length=61, new_tokens=NEW, dtype=jnp.float32)
    shapes = [[leaf.shape for leaf in jax.tree.leaves(cache.entries)] for cache in (plan, answer.cache)]
    assert shapes[0] == shapes[1]
    rows = 2 * (16 + PAGE - 1) + 64 + PAGE - 1 + 64  # two layers of 16, and one of the prompt's bucket and the room's
    rows = -(-rows // PAGE) * PAGE
    assert plan.nbytes == answer.cache.nbytes == 4 * 4 * 4 * (rows * (2 * 8 + 1 + 1) + LAYERS * (4 + 1))

    pool = answer.cache.entries
    capacity, used = np.stack(pool.capacity, axis=-1), np.stack(pool.used, axis=-1)
    for b, row in enumerate(ROWS):
        n = len(row)
        fits = n <= 16
        expected = [UNLIMITED, 16, 16] if fits else literal_counts(received(b), n, 16, 10, (0,))
        assert capacity[b].tolist() == [list(expected)] * 4
        assert used[b].tolist() == [[n + NEW - 1 if c == UNLIMITED else c for c in expected]] * 4
    assert capacity[:2, 0, 1].tolist() != [16, 16]


@cache
def received(row):
    """The attention [L, H, N] that the tokens of a row received from all its queries, from float64 attention rows."""
    reader, tokens = Reader(params()), range(len(ROWS[row]))
    reader.read(ROWS[row])
    return reader.weights(tokens, tokens).mean(axis=2).sum(axis=2)


def test_which_prompt_tokens_are_retained():
    """Half of each layer's own share is recent; the others are the first tokens and the highest scores."""
    policy = policies.parse(TEXT)
    cache = kvjax.prefill(params(), ROWS, policy=policy)
    pool, n = cache.entries, len(ROWS[1])
    for i in range(1, LAYERS):
        scores = received(1)[i]
        for h in range(4):
            start, count = int(pool.start[i][1, h]), int(pool.capacity[i][1, h])
            own = np.asarray(pool.positions[1, h, start : start + count])
            recent = count // 2
            middle = 4 + np.argsort(-scores[h, 4 : n - recent], kind="stable")[: count - recent - 4]
            assert sorted(own.tolist()) == [*range(4), *sorted(middle.tolist()), *range(n - recent, n)]


@pytest.mark.slow
def test_after_a_turn_layers_hold_what_they_may():
    turn = kvjax.prefill(params(), [row[:5] for row in ROWS], cache=answered().cache)
    _, after = tiny.step(params(), kvjax.with_room(turn, 1), np.arange(len(ROWS)), np.ones(len(ROWS), bool))
    for filled in (turn, after):
        used, capacity = np.asarray(filled.entries.used), np.asarray(filled.entries.capacity)
        seen = np.asarray(filled.length)[:, None]
        assert (used == np.where(capacity == UNLIMITED, seen, capacity)).all()


@pytest.mark.slow
def test_a_budget_beyond_the_text_is_full_attention():
    """U1, for the prompts and a token after each."""
    params, token = tiny.decoder(8, 4, (None, None)), np.arange(len(ROWS))
    texts = [np.append(row, own) for row, own in zip(ROWS, token, strict=True)]
    whole = tiny.full_logits(params, texts, 64)
    logits, filled = tiny.prefill(params, "d2o:budget=99,dense_first=0,dense_last=0", ROWS, 64)
    after, _ = tiny.step(params, filled, token, np.ones(len(ROWS), bool))
    for b, row in enumerate(ROWS):
        np.testing.assert_allclose([logits[b], after[b]], whole[b][len(row) - 1 :], atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_layer_budgets_on_a_mesh():
    spread, expected = kvjax.shard(params(), kvjax.make_mesh(2, 4)), answered()
    answer = kvjax.generate(spread, ROWS, policy=TEXT, max_new_tokens=NEW, log_probs=True)
    np.testing.assert_array_equal(answer.tokens, expected.tokens)
    np.testing.assert_allclose(answer.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(answer.cache.entries.capacity, expected.cache.entries.capacity)
    np.testing.assert_array_equal(answer.cache.entries.positions, expected.cache.entries.positions)


def test_refusals():
    with pytest.raises(ValueError, match=r"SimilarityMerge: it compares keys after RoPE; .*positions='in_cache'"):
        Policy(AccumulatedAttention(), Fixed(16), TopTokens(), SimilarityMerge(), every=1, positions="in_cache")
    with pytest.raises(ValueError, match=r"first 2 and the last 1 of 3 layers .* expected fewer than 3 together"):
        kvjax.generate(tiny.decoder(8, 4, (None,) * 3), ROWS, policy=policies.d2o(16))
    with pytest.raises(ValueError, match="expected one that is the same for all layers"):
        VarianceShares(policies.d2o().budget)
    with pytest.raises(ValueError, match=r"a budget of Everything\(\): expected one with a limit"):
        VarianceShares(policies.full().budget)
    assert policies.d2o().budget == VarianceShares(Fraction(0.2))
    assert policies.parse(repr(policies.d2o(24))) == policies.d2o(24)

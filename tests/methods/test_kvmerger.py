"""KVMerger against its Algorithms 1 and 2 as they are printed, in NumPy: one head, one token at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import Slots
from kvjax.methods.kvmerger.cluster import BLOCK, set_ends, solve_theta
from kvjax.models import AttentionLayer, Rope
from kvjax.pallas_kernels import Reduction, slot_attention, window_scores
from kvjax.parts import Drop, GaussianMerge
from kvjax.policies import kvmerger
from kvjax.policy import Moment, Ranked
from tests import tiny
from tests.methods.literal_merging import condense, cosine, merging_sets
from tests.methods.reference import attended, rotated, softmax

RNG = np.random.default_rng(8)


def wandering(B, H, N, D=16, step=0.15):
    """Keys of unit length whose neighbours are similar."""
    keys = np.cumsum(RNG.normal(size=(B, H, N, D)) * step, axis=2) + RNG.normal(size=(B, H, 1, D))
    return (keys / np.linalg.norm(keys, axis=-1, keepdims=True)).astype(np.float32)


sets_of = jax.jit(set_ends, static_argnames="rule")
solve = jax.jit(solve_theta, static_argnames="rule")


@partial(jax.jit, static_argnames=("merge", "size"))
def condensed(merge, entries, scores, size):
    moment = Moment(
        jnp.max(entries.positions[:, 0], axis=-1) + 1, AttentionLayer(0, Rope(1e4), None, 1.0, jnp.zeros(0))
    )
    counts = jnp.full(entries.capacity.shape, size)
    ranked = Ranked(scores, entries.positions, counts, size)
    return merge.compress(entries, moment, ranked, lambda ranked: ranked.positions)[0]


@pytest.mark.parametrize("rule", ["anchor", "chain"])
def test_sets_are_those_of_algorithm_1_however_long(rule):
    B, H, N = 3, 2, 3 * BLOCK + 21
    keys = wandering(B, H, N)
    counts = np.array([[N, N - 1], [BLOCK + 1, BLOCK], [1, 0]])
    keys[0, 1, 5 : 2 * BLOCK + 50] = keys[0, 1, 5]  # identical: one set across three blocks
    longest = 0
    for sections in (np.zeros((B, H, N), int), np.cumsum(RNG.random((B, H, N)) < 0.02, axis=-1)):
        for theta in (-1.1, 0.0, 0.6, 0.75, 0.95, 2.0):
            found = np.asarray(sets_of(keys, sections, counts, np.full((B, H), theta, np.float32), rule=rule))
            for b, h in np.ndindex(B, H):
                n = counts[b, h]
                sets = merging_sets(keys[b, h, :n].astype(float), sections[b, h], theta, rule)
                longest = max([longest, *map(len, sets)]) if 0 < theta < 2 else longest
                assert np.flatnonzero(found[b, h]).tolist() == sorted(members[0] for members in sets)
    assert longest > 2 * BLOCK


@pytest.mark.parametrize("rule", ["anchor", "chain"])
def test_tokens_that_are_as_similar_as_theta_are_apart(rule):
    """Orthogonal keys in turn, across a border of blocks: their cosine is 0 exactly."""
    N = BLOCK + 9
    keys = np.eye(16, dtype=np.float32)[np.arange(N) % 2][None, None]
    nothing = np.zeros((1, 1, N), int)
    found = np.asarray(sets_of(keys, nothing, np.array([[N]]), np.zeros((1, 1), np.float32), rule=rule))
    expected = merging_sets(keys[0, 0].astype(float), nothing[0, 0], 0.0, rule)
    assert np.flatnonzero(found[0, 0]).tolist() == sorted(members[0] for members in expected) == list(range(N))


@pytest.mark.parametrize("rule", ["anchor", "chain"])
def test_theta_is_the_largest_that_leaves_no_more_sets_than_room(rule):
    B, H, N = 2, 2, 80
    keys, counts, room = wandering(B, H, N, step=0.3), np.array([[80, 70], [41, 80]]), np.array([[20, 7], [11, 1]])
    sections = np.zeros((B, H, N), int)
    sections[1, 1] = np.arange(N) // 20  # more sections than room: one set each
    theta = np.asarray(solve(keys, sections, counts, room, rule=rule))
    for b, h in np.ndindex(B, H):
        count = [
            len(merging_sets(keys[b, h, : counts[b, h]].astype(float), sections[b, h], t, rule))
            for t in (theta[b, h], theta[b, h] + 1e-3)
        ]
        assert count[0] <= room[b, h] < count[1] if (b, h) != (1, 1) else count[0] == 4


def test_g4_clustering():
    angles = np.deg2rad([100, 80, 65, 45, 25, 0])
    keys = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)[None, None]
    for rule, theta, ends in [
        ("anchor", 0.75, [0, 3, 5]),
        ("anchor", 0.90, [1, 3, 5]),
        ("chain", 0.75, [5]),
        ("chain", 0.90, [5]),
    ]:
        found = sets_of(keys, np.zeros((1, 1, 6), int), np.array([[6]]), np.array([[theta]], np.float32), rule=rule)
        assert np.flatnonzero(found).tolist() == ends


def layer(keys, values=None, lengths=None):
    """Entries [B, H, M, D] padded on the left."""
    B, H, M, _ = keys.shape
    lengths = np.full(B, M) if lengths is None else np.asarray(lengths)
    positions = np.maximum(np.arange(M) - (M - lengths[:, None]), -1)
    return Slots(
        jnp.asarray(keys, jnp.float32),
        jnp.asarray(keys if values is None else values, jnp.float32),
        jnp.asarray(np.broadcast_to(positions[:, None], (B, H, M))),
        capacity=jnp.full((B, H), M),
    )


def merged_entry(keys, values, scores, **options):
    """The one entry that all tokens of a head are merged into."""
    n = len(keys)
    entries = layer(np.reshape(keys, (1, 1, n, -1)), np.reshape(values, (1, 1, n, -1)))
    merge = GaussianMerge(heavy=0, theta=-1.0, **options)
    out = condensed(merge, entries, jnp.asarray(scores, jnp.float32)[None, None], size=1)
    (slot,) = np.flatnonzero(out.positions[0, 0] >= 0)
    assert out.positions[0, 0, slot] == slot
    return slot, np.asarray(out.keys[0, 0, slot]), np.asarray(out.values[0, 0, slot])


WEIGHTS = {
    "mean": [0.453073, 0.399836, 0.147091],
    "eq7": [0.423946, 0.387458, 0.188596],
    4 / 3: [0.545138, 0.411491, 0.043371],  # the mean over all three of the set, pivot included
    "rms": [0.504025, 0.412661, 0.083315],
    5.0: [0.355181, 0.348148, 0.296672],
}


def test_g5_weights_under_each_sigma():
    """Of the tokens 0, 1 and 3 of a set, the first being the pivot, beside a set of one."""
    keys, rank = jnp.array([0.0, 1, 3, 9])[None, None, :, None], jnp.array([[[3.0, 2, 1, 0]]])
    sets, there = jnp.array([[[0, 0, 0, 1]]]), jnp.ones((1, 1, 4), bool)
    merges = [GaussianMerge(sigma=sigma) for sigma in WEIGHTS]
    found = jax.jit(lambda keys: [merge._weigh(keys, rank, sets, there) for merge in merges])(keys)
    for (weights, is_pivot), expected in zip(found, WEIGHTS.values(), strict=True):
        np.testing.assert_allclose(weights[0, 0], [*expected, 1], atol=2e-6)
        assert is_pivot.tolist() == [[[True, False, False, True]]]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("sigma", "weights"), WEIGHTS.items())
def test_g5_weights(sigma, weights):
    """Scaled keys leave the weights alone where sigma is a distance, and change them by equation 7."""
    slot, key, value = merged_entry([0, 1, 3], np.eye(3), [3, 2, 1], sigma=sigma)
    assert slot == 0
    np.testing.assert_allclose(value, weights, atol=2e-6)
    np.testing.assert_allclose(key, np.dot(weights, [0, 1, 3]), atol=1e-5)
    for scale, g in [(10.0, [1, 0.9991, 0.9919]), (0.1, [1, 0.00012, 0])]:
        _, _, scaled = merged_entry(scale * np.array([0, 1, 3]), np.eye(3), [3, 2, 1], sigma=sigma)
        if sigma == "eq7":
            np.testing.assert_allclose(scaled / scaled[0], g, atol=1e-4)
        elif isinstance(sigma, str):
            np.testing.assert_allclose(scaled, weights, atol=2e-6)


def test_e5_a_merged_entry_weighs_as_one_token():
    """Two equal keys and another: a third each, and half each when the two have become one."""
    entries = layer(np.ones((1, 1, 3, 2)))
    scores = jnp.array([[[1.0, 0.5, jnp.inf]]])
    out = condensed(GaussianMerge(heavy=0, theta=0.5), entries, scores, size=2)
    np.testing.assert_array_equal(out.positions, [[[0, -1, 2]]])
    logits = np.asarray(out.keys[0, 0])[[0, 2]] @ np.ones(2)
    np.testing.assert_allclose(softmax(logits), [0.5, 0.5], rtol=1e-6)


@pytest.mark.long
def test_e5_a_merged_entry_weighs_as_its_tokens():
    """With ln 2 added to their logit the two have two thirds, as they had apart; merged again, all of it."""
    entries = replace(layer(np.ones((1, 1, 3, 2))), bias=jnp.zeros((1, 1, 3)))
    merge = GaussianMerge(heavy=0, theta=0.5, count_bias=True)
    out = condensed(merge, entries, jnp.array([[[1.0, 0.5, jnp.inf]]]), size=2)
    np.testing.assert_allclose(out.bias[0, 0, [0, 2]], [np.log(2), 0], rtol=1e-6)
    logits = np.asarray(out.keys[0, 0, [0, 2]] @ np.ones(2)) + out.bias[0, 0, [0, 2]]
    np.testing.assert_allclose(softmax(logits), [2 / 3, 1 / 3], rtol=1e-6)
    again = condensed(merge, out.gather(jnp.array([[[0, 2]]])), jnp.ones((1, 1, 2)), size=1)
    np.testing.assert_allclose(again.bias[0, 0, 0], np.log(3), rtol=1e-6)


@pytest.mark.slow
def test_merging_equal_keys_with_their_count_changes_no_attention():
    """Two equal keys among others: the context, and what the rest receives, before and after."""
    keys, values = RNG.normal(size=(2, 1, 2, 12, 8)).astype(np.float32)
    keys[:, :, 5] = keys[:, :, 4]
    q = RNG.normal(size=(1, 4, 1, 8)).astype(np.float32)
    entries = replace(layer(keys, values), bias=jnp.zeros((1, 2, 12)))
    scores = jnp.full((1, 2, 12), jnp.inf).at[:, :, 4:6].set(1.0)
    merged = condensed(GaussianMerge(heavy=0, theta=0.99, count_bias=True), entries, scores, size=11)
    assert merged.positions[0].tolist() == [[0, 1, 2, 3, 4, -1, *range(6, 12)]] * 2
    unbiased = replace(merged, bias=None)
    for other, same in ((merged, True), (unbiased, False)):
        results = []
        for held in (replace(entries, bias=None), other):
            where, t = held.positions, jnp.array([[20]])
            args = (q, held.keys, held.values, t, where)
            context, lse, received, _ = slot_attention(*args, scale=0.5, bias=held.bias, received="sum")
            again = window_scores(
                q, held.keys, t, where, scale=0.5, lse=lse, bias=held.bias, reduction=Reduction("sum", "sum")
            )
            np.testing.assert_allclose(again, received, atol=1e-6)
            received = received.at[:, :, 4].add(received[:, :, 5]).at[:, :, 5].set(0)
            results.append((context, lse, received))
        assert all(np.allclose(x, y, atol=1e-5) for x, y in zip(*results, strict=True)) == same


@pytest.mark.slow
def test_counts_stay_with_their_entries_and_cost_nothing_where_they_are_off():
    """A prompt and a step; without counts a decode step is the very program of a policy that drops."""
    rows = [np.repeat(RNG.integers(0, tiny.VOCAB, n), 3)[:n] for n in (44, 31, 12)]
    params, token, rest = tiny.decoder(), np.arange(3), np.ones(3, bool)
    plain = GaussianMerge(heavy=3, theta=0.3)
    policy = kvmerger(18, recent=5, merge=plain)
    programs = {}
    for name, merge in {"counts": replace(plain, count_bias=True), "none": plain, "drop": Drop()}.items():
        own = replace(policy, merge=merge)
        planned = kvjax.plan_cache(params.config, own, batch=3, length=48, new_tokens=8, dtype=np.float32)
        programs[name] = str(jax.make_jaxpr(tiny.step)(params, planned, token, rest))
        if name != "counts":
            assert planned.entries[0].bias is None
            continue
        _, cache = tiny.prefill(params, own, rows, 48)
        _, after = tiny.step(params, cache, token, rest)
        for held in (cache, after):
            tokens = np.where(held.entries[0].positions >= 0, np.exp(held.entries[0].bias), 0)
            positions = np.asarray(held.entries[0].positions)
            assert (tokens > 1.5).any()
            np.testing.assert_allclose(tokens, np.round(tokens), atol=1e-4)
            recent = positions >= np.array([39, 26, 0])[:, None, None]  # and the decoded token
            np.testing.assert_array_equal(tokens[recent], 1)
            assert (tokens.sum(axis=-1)[2] == 12 + (held is after)).all()
            assert (tokens.sum(axis=-1) <= np.array([44, 31, 12])[:, None] + (held is after) + 1e-3).all()
    assert programs["none"] == programs["drop"] != programs["counts"]


@pytest.mark.slow
def test_e6_neighbours_of_the_same_content_after_rope():
    keys = np.stack([rotated(np.array([1.0, 0.0]), position, 1e4) for position in range(2)])
    _, merged, _ = merged_entry(keys, keys, [1, 1], weights="average")
    np.testing.assert_allclose([cosine(*keys), np.linalg.norm(merged)], [0.5403, 0.8776], atol=1e-4)
    for theta, count in [(0.54, 1), (0.541, 2)]:
        ends = sets_of(
            keys[None, None].astype(np.float32),
            np.zeros((1, 1, 2), int),
            np.array([[2]]),
            np.array([[theta]]),
            rule="anchor",
        )
        assert int(jnp.sum(ends)) == count


OPTIONS = {
    "anchor": {"theta": 0.3},
    "chain": {"theta": 0.3, "rule": "chain", "sigma": "rms"},
    "straddle": {"theta": 0.0, "straddle": True, "sigma": "eq7"},
    "average": {"theta": 0.3, "weights": "average"},
}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "name"),
    [(4, 1, "anchor"), (2, 2, "chain"), (4, 1, "average"), (7, 1, "straddle")],
)
def test_a_prompt_is_merged_as_algorithms_1_and_2_say(heads, kv_heads, name):
    """A batch of three lengths, groups of 1, 4 and 7; the shortest is within the budget."""
    params, options = tiny.decoder(heads, kv_heads), OPTIONS[name]
    rows = [np.repeat(RNG.integers(0, tiny.VOCAB, n), 3)[:n] for n in (44, 31, 12)]
    policy = kvmerger(budget=18, recent=5, merge=GaussianMerge(heavy=3, **options))
    _, cache = tiny.prefill(params, policy, rows, 48)
    entries = cache.entries[0]
    assert entries.slots == 18 + 8
    merged = 0
    for b, row in enumerate(rows):
        for h, (keys, values, scores) in enumerate(zip(*attended(params, row), strict=True)):
            expected = condense(keys, values, scores, budget=18, recent=5, heavy=3, **options)
            positions = np.asarray(entries.positions[b, h])
            assert sorted(positions[positions >= 0]) == sorted(expected)
            for slot in np.flatnonzero(positions >= 0):
                key, value = expected[positions[slot]]
                np.testing.assert_allclose(entries.keys[b, h, slot], key, atol=1e-5)
                np.testing.assert_allclose(entries.values[b, h, slot], value, atol=1e-5)
                merged += not np.allclose(key, keys[positions[slot]])
    assert merged > 3


@pytest.mark.slow
def test_default_shares_of_a_prompt():
    """Half of each prompt: 34 % of it recent tokens, 24 % heavy hitters, sets at theta = 0.75, each rounded down."""
    params = tiny.decoder(4, 2)
    rows = [np.repeat(RNG.integers(0, tiny.VOCAB, n), 3)[:n] for n in (44, 31, 21)]
    _, cache = tiny.prefill(params, kvmerger(), rows, 48)
    entries, merged = cache.entries[0], 0
    for b, row in enumerate(rows):
        budget = len(row) // 2
        options = {"recent": budget * 34 // 100, "heavy": budget * 24 // 100, "theta": 0.75}
        for h, head in enumerate(zip(*attended(params, row), strict=True)):
            expected = condense(*head, budget=budget, **options)
            check(entries, b, h, expected)
            merged += sum(not np.allclose(key, head[0][p]) for p, (key, _) in expected.items())
    assert merged > 3


def check(entries, b, h, expected):
    """The positions, keys and values of a head."""
    slot = {int(p): i for i, p in enumerate(np.asarray(entries.positions[b, h])) if p >= 0}
    assert sorted(slot) == sorted(expected)
    for position, (key, value, *_) in expected.items():
        np.testing.assert_allclose(entries.keys[b, h, slot[position]], key, atol=1e-5)
        np.testing.assert_allclose(entries.values[b, h, slot[position]], value, atol=1e-5)
    return slot


def test_theta_that_meets_the_budget_fills_it():
    keys, lengths = wandering(3, 2, 64), [64, 50, 20]
    scores = jnp.asarray(RNG.random((3, 2, 64)), jnp.float32)
    entries = layer(keys, lengths=lengths)
    out = condensed(GaussianMerge(heavy=4, theta=None), entries, scores, size=24)
    occupancy = np.asarray(out.occupancy)
    assert (occupancy <= 24).all()
    assert (occupancy[:2] >= 20).all()
    assert (occupancy[2] == 20).all()
    np.testing.assert_array_equal(out.keys[2], entries.keys[2])  # within the budget


def test_a_random_pivot_is_drawn_by_position_and_seed():
    keys = wandering(2, 1, 40)
    other = np.concatenate([keys[1:], wandering(1, 1, 40)])
    scores, pivots = jnp.zeros((2, 1, 40)), {}
    for seed in (0, 1):
        merge = GaussianMerge(heavy=0, theta=0.7, pivot="random", seed=seed)
        pivots[seed] = np.asarray(condensed(merge, layer(keys, lengths=[40, 30]), scores, size=6).positions)
        moved = condensed(merge, layer(other, lengths=[30, 9]), scores, size=6)
        np.testing.assert_array_equal(moved.positions[0], pivots[seed][1])
    assert (pivots[0] != pivots[1]).any()
    assert ((pivots[0] >= 0).sum(axis=-1) == (pivots[1] >= 0).sum(axis=-1)).all()

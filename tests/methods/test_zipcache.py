"""ZipCache: which entries are salient, the codes and the attention over them, bytes, later turns, and refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import Layers, Slots
from kvjax.methods.zipcache import Probes
from kvjax.methods.zipcache.coded import CodedEntries
from kvjax.models import AttentionLayer
from kvjax.policies import full, parse, snapkv, zipcache
from kvjax.policy import Attended, LayerShape
from tests import tiny
from tests.methods import one_layer
from tests.methods.literal_codes import literal_entries
from tests.methods.reference import rotated, softmax
from tests.products import each_once

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = (
    "base=snapkv,base.budget=12,base.window=4,base.kernel=3,window=4,queries=3",
    "salient=0.3,bits=8,other_bits=4,window=8,queries=0",
)

RNG = np.random.default_rng(4)
ROWS = [RNG.integers(0, tiny.VOCAB, n).tolist() for n in (40, 23, 3)]
SPEC = "zipcache:base=snapkv,base.budget=0.5,base.window=4,salient=0.4,window=4,queries=3"
EVERYTHING = "zipcache:window=6,queries=5,seed=2"


def literal_probes(n: int, window: int, queries: int, seed: int) -> list[int]:
    """The last positions of a prompt of n tokens, and of those before them the ones with the largest draws."""
    key = jax.random.key(seed)
    earlier = range(max(0, n - window))
    draws = {p: float(jax.random.uniform(jax.random.fold_in(key, p))) for p in earlier}
    return sorted(sorted(earlier, key=lambda p: -draws[p])[:queries]) + list(range(len(earlier), n))


def literal_salience(q: np.ndarray, k: np.ndarray, held: list[int], probes: list[int]) -> np.ndarray:
    """The mean weight that each held key gets from the probes that see it, of queries [G, n, D] and keys [n, D]."""
    sums, seen = np.zeros(len(held)), np.zeros(len(held))
    for p in probes:
        sees = [i for i, position in enumerate(held) if position <= p]
        if sees:
            weights = softmax(q[:, p] @ k[held][sees].T / np.sqrt(q.shape[-1]))
            sums[sees] += weights.mean(axis=0)
            seen[sees] += 1
    return sums / np.maximum(seen, 1)


def literal_context(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The attention of queries [G, D] over all keys [n, D]."""
    return softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v


def positions_of(coded: CodedEntries, b: int, h: int) -> list[list[int]]:
    """The positions of the entries of a head in each part."""
    sizes = np.cumsum([part.codes.shape[2] for part in coded.values])[:-1]
    return [x[x >= 0].tolist() for x in np.split(np.asarray(coded.positions)[b, h], sizes)]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("base", "heads", "kv_heads", "salient", "bits", "other_bits"),
    each_once(
        ["full", "snapkv:budget=9,window=3,kernel=3", "knorm:budget=9"],
        [(2, 2), (8, 2), (7, 1)],
        [(0.6, 4, 2), (0.3, 8, 4)],
    ),
)
def test_salience_codes_and_attention(
    base: str, heads: int, kv_heads: int, salient: float, bits: int, other_bits: int
) -> None:
    """Against NumPy, on prompts longer and shorter than the budget and the number of probes."""
    lengths, prompt, steps, window, queries, D = np.array([20, 11, 5, 2]), 20, 2, 4, 3, 8
    policy = zipcache(parse(base), salient, bits, other_bits, window, queries, seed=7)
    rng = np.random.default_rng(heads)
    q, k, v = (rng.normal(size=(4, n, prompt + steps, D)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    v *= np.exp(rng.normal(size=(1, kv_heads, 1, D)) - 4).astype(np.float32)  # below 1, and apart by channel
    _, plain = one_layer.read(parse(base), lengths, prompt, q, k, v)
    _, entries = one_layer.read(policy, lengths, prompt, q, k, v)
    coded = entries[0].settled
    assert isinstance(coded, CodedEntries)
    assert [part.bits for part in coded.keys] == [part.bits for part in coded.values] == [bits, other_bits]
    found_keys, found_values = coded.plain()
    grown = Layers((entries[0].grow(steps),))
    contexts = []
    for i in range(steps):
        part = (x[:, :, prompt + i : prompt + i + 1] for x in (q, k, v))
        context, grown = one_layer.step(policy, jnp.asarray(lengths + i), grown, *part)
        contexts.append(np.asarray(context)[:, :, 0])
    for b, n in enumerate(lengths.tolist()):
        # Prompts lie at the right end of the given arrays; the steps follow them.
        text = [np.concatenate([x[b, :, prompt - n : prompt], x[b, :, prompt:]], axis=1) for x in (q, k, v)]
        text[:2] = [
            np.stack([rotated(x[:, t].astype(np.float64), t, 1e4) for t in range(n + steps)], axis=1) for x in text[:2]
        ]
        probes = literal_probes(n, window, queries, 7)
        for h in range(kv_heads):
            held = one_layer.held(plain, b)[h]
            own, keys, values = text[0].reshape(kv_heads, -1, n + steps, D)[h], text[1][h], text[2][h]
            salience = literal_salience(own, keys, held, probes)
            number = len(held) - int(len(held) * (1 - salient) + 1e-9)
            best = sorted(np.asarray(held)[np.argsort(-salience, kind="stable")[:number]].tolist())
            parts = [best, sorted(set(held) - set(best))]
            assert positions_of(coded, b, h) == parts
            # The numbers that the cache holds without codes, so that both round the same ones.
            cached = {int(p): i for i, p in enumerate(np.asarray(plain[0].positions)[b, h]) if p >= 0}
            whole = [np.asarray(x)[b, h] for x in (plain[0].keys, plain[0].values)]
            rows = [[x[cached[p]] for p in held] for x in whole]
            divisors = np.sqrt(np.abs(rows[1]).max(axis=0))
            known = {}
            for each, own_bits in zip(parts, (bits, other_bits), strict=True):
                given = (np.array([x[cached[p]] for p in each]).reshape(-1, D) for x in whole)
                for p, key, value in zip(each, *literal_entries(*given, own_bits, divisors), strict=True):
                    known[p] = key, value
            at = np.asarray(coded.positions)[b, h].tolist()
            for p in held:
                np.testing.assert_allclose(found_keys[b, h, at.index(p)], known[p][0], atol=1e-5)
                np.testing.assert_allclose(found_values[b, h, at.index(p)], known[p][1], atol=1e-5)
            for i in range(steps):
                seen = [n + j for j in range(i + 1)]
                all_keys = np.array([known[p][0] for p in held] + [keys[p] for p in seen])
                all_values = np.array([known[p][1] for p in held] + [values[p] for p in seen])
                expected = literal_context(own[:, n + i], all_keys, all_values)
                found = contexts[i][b].reshape(kv_heads, -1, D)[h]
                np.testing.assert_allclose(found, expected, atol=2e-5)


def in_slots(cache: kvjax.KVCache) -> kvjax.KVCache:
    """The same entries as arrays in slots."""
    layers = []
    for layer in cache.entries:
        order = jnp.argsort(layer.all_positions < 0, axis=-1, stable=True)
        layers.append(layer.plain().gather(order))
    return replace(cache, entries=Layers(tuple(layers)))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "dtype"), each_once([SPEC, EVERYTHING], [jnp.float32, jnp.bfloat16]))
def test_answers_and_later_turns_are_those_of_the_numbers_that_codes_stand_for(spec: str, dtype: jnp.dtype) -> None:
    """Under jit, with a sliding window in one layer: steps, and a turn of several tokens between them."""
    params = jax.tree.map(lambda x: x.astype(dtype), tiny.decoder(heads=8, windows=(None, 12)))
    base = replace(parse(spec), storage=full().storage)
    coded, whole = (kvjax.with_room(kvjax.prefill(params, ROWS, policy=policy), 12) for policy in (parse(spec), base))
    assert coded.entries[1].settled is None
    plain, extend, apart = in_slots(coded), jax.jit(kvjax.extend), 0.0
    for n in (1, 4, 1):
        tokens = RNG.integers(0, tiny.VOCAB, (3, n))
        (ours, coded), (theirs, plain), (others, whole) = (extend(params, x, tokens) for x in (coded, plain, whole))
        np.testing.assert_allclose(ours, theirs, atol=1e-5 if dtype == jnp.float32 else 0.1)
        apart = max(apart, np.abs(ours - others).max())
    assert apart > 0.05
    assert coded.length.tolist() == [46, 29, 9]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC.replace("0.5", "12"), EVERYTHING])
def test_a_prompt_in_pieces_is_the_prompt_at_once(spec: str) -> None:
    """Pieces are shorter than the window, and so is one of the rows. The budget does not depend on the first piece."""
    params, policy = tiny.decoder(windows=(None, 12)), parse(spec)
    expected = kvjax.prefill(params, ROWS, policy=policy)
    chunked = kvjax.prefill(params, ROWS, policy=policy, chunk=3)
    begun = kvjax.prefill(params, [row[:-2] for row in ROWS], policy=policy, compress="never")
    ended = kvjax.extend(params, begun, [row[-2:] for row in ROWS])[1]
    for found in (chunked, ended):
        assert found.entries[1].settled is None
        for row in range(3):
            for h in range(2):
                parts, same = (positions_of(x.entries[0].settled, row, h) for x in (found, expected))
                assert parts == same
            assert tiny.held(found, row) == tiny.held(expected, row)
        logits, wanted = (kvjax.extend(params, kvjax.with_room(x, 1), [[5]] * 3)[0] for x in (found, expected))
        np.testing.assert_allclose(logits, wanted, atol=5e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_by_hand(dtype: str) -> None:
    """Of n entries, floor(0.4 n) have 2 bits and the others 4; ranges are numbers of the cache.

    A layer with a sliding window has no codes.
    """
    config = replace(tiny.decoder().config, head_dim=128, windows=(None, 48))
    number = jnp.dtype(dtype).itemsize
    sizes = {"batch": 3, "length": 192, "new_tokens": 64, "dtype": dtype}
    for base, salient, others in ((snapkv(101), 61, 40), (full(), 116, 76)):
        arrays = (64 + 48) * (256 * number + 4)
        codes = salient * 2 * 64 + others * 2 * 32
        ranges = 2 * 2 * 128 + 128 + (salient + others) * 2
        expected = arrays + codes + ranges * number + (salient + others) * 4 + 2 * 4
        assert kvjax.plan_cache(config, zipcache(base), **sizes).nbytes == 3 * 2 * expected


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("scale", "softcap"), [(0.5, 2.0), (1.0, None), (0.05, None)])
def test_the_salient_have_the_largest_mean_weights(scale: float, softcap: float | None) -> None:
    """Twelve entries in any order and seven, four probes and three, of two query heads for each of two kv heads."""
    rng, (B, H, G, M, P, D) = np.random.default_rng(1), (2, 2, 2, 12, 4, 8)
    policy = zipcache(salient=0.4, window=3, queries=1)
    positions = np.array([rng.permutation(M), [*range(7), *[-1] * 5]])
    at = np.array([[5, 9, 10, 11], [-1, 4, 5, 6]])
    q, k, v = (rng.normal(size=(B, n, m, D)).astype(np.float32) * 3 for n, m in ((H * G, P), (H, M), (H, M)))
    state = Probes(q, np.broadcast_to(at[:, None], (B, H, P)))
    entries = Slots(k, v, np.broadcast_to(positions[:, None], (B, H, M)), np.full((B, H), M), storing=state)
    settle = jax.jit(partial(policy.storage.settle, scale=scale, window=None, softcap=softcap))
    found = settle(entries).settled
    for b, number in enumerate((5, 3)):
        held = {int(p): slot for slot, p in enumerate(positions[b]) if p >= 0}
        for h in range(H):
            salience = {}
            for p, slot in held.items():
                given = []
                for query in (query for query in range(P) if at[b, query] >= p):
                    seen = [held[other] for other in held if other <= at[b, query]]
                    logits = scale * q[b, h * G : (h + 1) * G, query].astype(np.float64) @ k[b, h, seen].T
                    weights = softmax(logits if softcap is None else softcap * np.tanh(logits / softcap))
                    given.append(weights[:, seen.index(slot)].mean())
                salience[p] = np.mean(given)
            best = sorted(salience, key=salience.get)[-number:]
            assert positions_of(found, b, h) == [sorted(best), sorted(set(held) - set(best))]


def test_probes_are_the_last_queries_and_drawn_ones() -> None:
    """Of texts that come in two calls, with padding; those of every query head."""
    storage, rng = zipcache(window=2, queries=3, seed=7).storage, np.random.default_rng(2)
    observe = jax.jit(lambda state, q, at: storage.observe(Slots.only(storing=state), attended(q, at)))

    def attended(q: Any, at: Any) -> Attended:
        return Attended(q, at, q[..., 0], None, jnp.sum(at >= 0, axis=1), layer)

    layer = AttentionLayer(0, one_layer.ROPE, None, 1.0, jnp.zeros(0))
    state = storage.init(LayerShape(2, 4, 2, 3, jnp.dtype("float32"), 8))
    queries = rng.normal(size=(2, 4, 12, 3)).astype(np.float32)  # by position
    for at in (np.array([range(6), [-1, -1, -1, -1, 0, 1]]), np.array([range(6, 12), [-1, 2, 3, 4, 5, 6]])):
        given = np.take_along_axis(queries, np.maximum(at, 0)[:, None, :, None], axis=2)
        state = observe(state, given, at)
        for b, n in enumerate(at.max(axis=1) + 1):
            expected = literal_probes(n, 2, 3, 7)
            own = np.asarray(state.positions)[b]
            assert own.tolist() == [[-1] * (5 - len(expected)) + expected] * 2
            np.testing.assert_array_equal(state.queries[b][:, own[0] >= 0], queries[b][:, expected])


def test_heads_whose_codes_fill_no_bytes_are_refused() -> None:
    config = replace(tiny.decoder().config, head_dim=10)
    ask = partial(kvjax.plan_cache, config, batch=1, length=8, new_tokens=1, dtype="float32")
    with pytest.raises(ValueError, match="other_bits=2 for heads of 10 channels: expected a multiple of 4 channels"):
        ask(zipcache())
    ask(zipcache(bits=8, other_bits=4))

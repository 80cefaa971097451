"""ThinK: which channels are dropped, the attention that is left, bytes, later turns, meshes, and refusals."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import Layers
from kvjax.methods.think import ThinEntries
from kvjax.policies import full, parse, snapkv, think
from kvjax.policy import PLAIN, Policy
from tests import tiny
from tests.methods import one_layer
from tests.methods.reference import rotated, softmax
from tests.products import each_once

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = (
    "base=snapkv,base.budget=12,base.window=4,base.kernel=3,ratio=0.5,window=4,recent=3",
    "ratio=0.3,window=30,recent=0",
)

RNG = np.random.default_rng(4)
ROWS = [RNG.integers(0, tiny.VOCAB, n).tolist() for n in (40, 23, 3)]
SPEC = "think:base=snapkv,base.budget=0.5,base.window=4,ratio=0.4,window=4,recent=5"
COUNTED = parse("kvmerger:budget=0.5,merge.count_bias=True")
EVERYTHING = "think:ratio=0.6,window=6,recent=4"


def literal_channels(q: np.ndarray, k: np.ndarray, ratio: float) -> list[int]:
    """The channels that a head's keys k [n, D] keep, given the window's queries q [G, W, D], as kvpress scores them."""
    scores = np.mean(np.mean(q**2, axis=1), axis=0) * np.mean(k**2, axis=0)
    lowest = np.argsort(scores, kind="stable")[: int(len(scores) * ratio)]
    return sorted(set(range(len(scores))) - set(lowest.tolist()))


def literal_context(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The attention of queries [G, D] over all keys [n, D]."""
    return softmax(q @ k.T / np.sqrt(q.shape[-1])) @ v


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    ("base", "heads", "kv_heads", "recent"),
    each_once(["full", "snapkv:budget=9,window=3,kernel=3", "knorm:budget=9"], [(2, 2), (8, 2), (7, 1)], [0, 4]),
)
def test_channels_and_attention_are_those_of_keys_with_zeros(base: str, heads: int, kv_heads: int, recent: int) -> None:
    """Against NumPy with all keys, on prompts longer and shorter than budget, window and `recent`."""
    lengths, prompt, steps, window, D = np.array([20, 11, 5, 2]), 20, 3, 6, 10
    policy = think(parse(base), ratio=0.4, window=window, recent=recent)
    rng = np.random.default_rng(heads)
    # Channels differ in size, so that the ones with the largest products stand out.
    sizes = np.exp(rng.normal(size=(2, 1, kv_heads, 1, D)))
    q, k, v = (rng.normal(size=(4, n, prompt + steps, D)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    q = (q * np.repeat(sizes[0], heads // kv_heads, axis=1)).astype(np.float32)
    k = (k * sizes[1]).astype(np.float32)
    _, plain = one_layer.read(parse(base), lengths, prompt, q, k, v)
    _, entries = one_layer.read(policy, lengths, prompt, q, k, v)
    grown = Layers((entries[0].grow(entries[0].slots + steps),))
    contexts = []
    for i in range(steps):
        part = (x[:, :, prompt + i : prompt + i + 1] for x in (q, k, v))
        context, grown = one_layer.step(policy, jnp.asarray(lengths + i), grown, *part)
        contexts.append(np.asarray(context)[:, :, 0])
    thin = entries[0].settled
    assert isinstance(thin, ThinEntries)
    assert thin.keys.shape[-1] == D - 4
    whole = [np.asarray(x) for x in jax.jit(ThinEntries.plain)(thin)]  # what a later turn of several tokens reads
    for b, n in enumerate(lengths.tolist()):
        held = one_layer.held(plain, b)
        # Prompts lie at the right end of the given arrays; the steps follow them.
        text = [np.concatenate([x[b, :, prompt - n : prompt], x[b, :, prompt:]], axis=1) for x in (q, k, v)]
        text[:2] = [
            np.stack([rotated(x[:, t].astype(np.float64), t, 1e4) for t in range(n + steps)], axis=1) for x in text[:2]
        ]
        for h in range(kv_heads):
            own = text[0].reshape(kv_heads, -1, n + steps, D)[h]
            keys, values = text[1][h], text[2][h]
            channels = literal_channels(own[:, max(0, n - window) : n], keys[held[h]], 0.4)
            assert np.asarray(thin.channels)[b, h].tolist() == channels
            newest = held[h][len(held[h]) - min(recent, len(held[h])) :]
            older = sorted(set(held[h]) - set(newest))
            positions = np.asarray(thin.positions)[b, h]
            assert sorted(positions[positions >= 0].tolist()) == older
            assert one_layer.held(entries, b)[h] == newest
            masked = np.zeros_like(keys)
            masked[newest] = keys[newest]
            masked[np.ix_(older, channels)] = keys[np.ix_(older, channels)]
            masked[n:] = keys[n:]
            for x, expected in zip(whole, (masked, values), strict=True):
                np.testing.assert_allclose(x[b, h][positions >= 0], expected[positions[positions >= 0]], atol=1e-5)
            for i in range(steps):
                seen = held[h] + list(range(n, n + i + 1))
                expected = literal_context(own[:, n + i], masked[seen], values[seen])
                found = contexts[i][b].reshape(kv_heads, -1, D)[h]
                np.testing.assert_allclose(found, expected, atol=2e-5)


def over_base(spec: str) -> tuple[Policy, Policy]:
    """A policy and its base."""
    policy = parse(spec)
    return policy, replace(policy, storage=PLAIN)


def with_zeros(whole: kvjax.KVCache, thin: kvjax.KVCache) -> kvjax.KVCache:
    """The same entries with all channels, of which those are zero that the other cache does not have."""
    layers = []
    for layer, other in zip(whole.entries, thin.entries, strict=True):
        if other.settled is None:  # a layer with a sliding window
            layers.append(layer)
            continue
        positions = jnp.where(other.settled.positions < 0, -2, other.settled.positions)
        older = jnp.any(layer.positions[..., None] == positions[:, :, None], axis=-1)
        left = jnp.any(other.settled.channels[..., None] == jnp.arange(layer.keys.shape[-1]), axis=-2)
        layers.append(replace(layer, keys=jnp.where(older[..., None] & ~left[:, :, None], 0, layer.keys)))
    return replace(whole, entries=Layers(tuple(layers)))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "dtype"), each_once([SPEC, EVERYTHING], [jnp.float32, jnp.bfloat16]))
def test_answers_and_later_turns_are_those_of_zeros(spec: str, dtype: jnp.dtype) -> None:
    """Under jit, with a sliding window in one layer: steps, and a turn of several tokens between them."""
    params = jax.tree.map(lambda x: x.astype(dtype), tiny.decoder(heads=8, windows=(None, 12)))
    thin, whole = (kvjax.with_room(kvjax.prefill(params, ROWS, policy=policy), 12) for policy in over_base(spec))
    zeros, extend, apart = with_zeros(whole, thin), jax.jit(kvjax.extend), 0.0
    for n in (1, 4, 1):
        tokens = RNG.integers(0, tiny.VOCAB, (3, n))
        (ours, thin), (theirs, zeros), (others, whole) = (extend(params, x, tokens) for x in (thin, zeros, whole))
        np.testing.assert_allclose(ours, theirs, atol=1e-5 if dtype == jnp.float32 else 0.1)
        apart = max(apart, np.abs(ours - others).max())
    assert apart > 0.2
    assert thin.length.tolist() == [46, 29, 9]


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
        np.testing.assert_array_equal(found.entries[0].settled.channels, expected.entries[0].settled.channels)
        assert found.entries[1].settled is None
        for row in range(3):
            assert tiny.held(found, row) == tiny.held(expected, row)
        logits, wanted = (kvjax.extend(params, kvjax.with_room(x, 1), [[5]] * 3)[0] for x in (found, expected))
        np.testing.assert_allclose(logits, wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_by_hand(dtype: str) -> None:
    """51 of 128 channels of older keys are not there, and each head has the indices of the others.

    A layer with a sliding window has all channels.
    """
    config = replace(tiny.decoder().config, head_dim=128, windows=(None, 48))
    number = jnp.dtype(dtype).itemsize
    sizes = {"batch": 3, "length": 192, "new_tokens": 64, "dtype": dtype}
    for base, retained in ((snapkv(100), 100), (full(), 192)):
        whole = (32 + 64) + 48
        thin = (retained - 32) * ((77 + 128) * number + 4) + 77 * 4
        expected = whole * (256 * number + 4) + thin + 2 * 4
        assert kvjax.plan_cache(config, think(base), **sizes).nbytes == 3 * 2 * expected


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (
            lambda: parse("adakv:base=think,base.base=snapkv"),
            "it stores .* the budget AdaptiveShares stores heads in",
        ),
        (lambda: think(COUNTED), "no bias, by which the merge GaussianMerge weighs entries"),
    ],
)
def test_refusals(ask, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ask()

"""A prompt that passes through the programs of its layers has the logits and the cache of one program of all layers."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.policies import parse
from kvjax.reading import layers
from tests.policy.presets import ALL, layers_of
from tests.test_prefill_each import MIXED, assert_same
from tests.tiny import VOCAB, decoder, left_pad

ROWS = [np.random.default_rng(b).integers(0, VOCAB, n) for b, n in enumerate((40, 23, 3))]
REPLAYED = "kvzip:budget=8,score.instruction='',score.starting='',score.suffix='',score.chunk=16"
POOL = "adakv:base=snapkv,base.budget=12,base.window=4"
TURN = [[5, 6, 7], [8, 9, 10], [9, 10, 11]]
DEEP = 6  # layers


@pytest.mark.long
@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    "text", [*MIXED, REPLAYED, *(pytest.param(text, marks=pytest.mark.exhaustive) for text in ALL)]
)
def test_it_is_what_one_program_gives(text: str) -> None:
    """In a caller's `jax.jit` all layers are in the caller's program. Rows are padded on the left."""
    params = decoder(windows=((None, 16) * 2)[: layers_of(text, 4)], gates=True)
    tokens, lengths = left_pad(ROWS, 40)

    def both_turns(extend: Any) -> tuple[KVCache, Any]:
        empty = kvjax.empty_cache(params, parse(text), lengths)
        first, cache = extend(params, empty, jnp.asarray(tokens), jnp.asarray(lengths))
        second, _ = extend(params, kvjax.with_room(cache, 3), jnp.asarray(TURN))
        return cache, (first, second)

    found, expected = both_turns(kvjax.extend), both_turns(jax.jit(kvjax.extend))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if ours.dtype == jnp.float32:
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.long
@pytest.mark.parametrize("text", [POOL, *(pytest.param(text, marks=pytest.mark.slow) for text in (*MIXED, REPLAYED))])
def test_several_layers_in_a_program(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU reads three layers and then the last one."""
    params = decoder(windows=(None, 16) * 2, gates=True)

    def caches() -> list[KVCache]:
        cache = kvjax.prefill(params, ROWS, policy=text)
        return [cache, kvjax.prefill(params, TURN, cache=cache)]

    expected = caches()
    monkeypatch.setattr(layers, "layers_at_once", lambda tokens, mesh: 3)
    for ours, theirs in zip(jax.tree.leaves(caches()), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_how_many_layers_a_program_reads() -> None:
    def of(platform: str, tokens: int) -> int:
        mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        return layers.layers_at_once(tokens, mesh)

    assert [of("gpu", tokens) for tokens in (1, 512, 1024, 4096, 10_000)] == [8, 8, 4, 1, 1]
    assert of("tpu", 1) == of("cpu", 1) == layers.layers_at_once(1, None) == 1


def deep(more: int = 0) -> Decoder:
    """A model whose programs no other test has compiled."""
    return decoder(windows=(None,) * DEEP, vocab=VOCAB + 7 + more)


@pytest.mark.long
def test_layers_of_a_kind_share_a_program(compiled: list[str]) -> None:
    kvjax.prefill(deep(1), ROWS, policy="snapkv:budget=12,window=4")
    programs = Counter(name for name in compiled if name in ("jit(begin)", "jit(_read_layers)", "jit(logits_of)"))
    assert programs == {"jit(begin)": 1, "jit(_read_layers)": 1, "jit(logits_of)": 1}
    compiled.clear()
    kvjax.prefill(deep(), ROWS, policy="morphkv:budget=12,window=4,dense_layers=2")
    assert Counter(compiled)["jit(_read_layers)"] == 2  # the first layers retain everything


@pytest.mark.slow
def test_a_turn_into_a_pool_leaves_the_cache_that_it_extends(compiled: list[str]) -> None:
    params = deep()
    cache = kvjax.prefill(params, ROWS, policy=POOL)
    before = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
    compiled.clear()
    turns = [kvjax.prefill(params, TURN, cache=cache) for _ in range(2)]
    assert Counter(compiled)["jit(_read_layers)"] == 1
    assert_same(*turns)
    for leaf, expected in zip(jax.tree.leaves(cache), before, strict=True):
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.slow
def test_layers_of_a_kind_share_the_program_of_a_replay(compiled: list[str]) -> None:
    kvjax.prefill(deep(), ROWS, policy="kvcompose:budget=12")
    # The hidden states behind the last layer are not computed.
    assert Counter(compiled)["jit(_replay_layer)"] == 2


@pytest.mark.long
def test_chunks_after_the_first_change_the_cache_in_place(compiled: list[str]) -> None:
    """The first makes the slots, those between share a program that donates them, and the last compresses."""
    chunked = kvjax.prefill(deep(2), ROWS, policy="snapkv:budget=12,window=4", chunk=8)
    assert Counter(compiled)["jit(_read_layers)"] == 3
    assert Counter(compiled)["jit(logits_of)"] == 1
    whole = kvjax.prefill(deep(2), ROWS, policy="snapkv:budget=12,window=4")
    np.testing.assert_array_equal(chunked.entries[0].positions, whole.entries[0].positions)

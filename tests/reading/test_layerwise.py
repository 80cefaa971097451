"""Prompts that pass through one layer after the other have the logits and caches of one program, bit by bit."""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.reading import layerwise
from tests.policy.presets import ALL
from tests.test_prefill_each import MIXED, assert_same
from tests.tiny import VOCAB, decoder

ROWS = [np.random.default_rng(b).integers(0, VOCAB, n) for b, n in enumerate((40, 23, 3))]
REPLAYED = "kvzip:budget=8,score.instruction='',score.starting='',score.suffix='',score.chunk=16"
TURN = [[5, 6, 7], [8], [9, 10]]


def both_turns(params: Decoder, text: str) -> tuple[KVCache, KVCache, list[Any]]:
    """The caches after a prompt and after another turn, and the answers to them."""
    first = kvjax.prefill(params, ROWS, policy=text)
    answer = kvjax.generate(params, ROWS, policy=text, max_new_tokens=5, log_probs=True)
    second = kvjax.generate(params, TURN, cache=answer.cache, max_new_tokens=5, log_probs=True)
    return first, second.cache, [x.tolist() for one in (answer, second) for x in (one.tokens, one.log_probs)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [*MIXED, REPLAYED, *(pytest.param(text, marks=pytest.mark.exhaustive) for text in ALL)]
)
def test_it_is_what_one_program_gives(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different lengths are padded on the left. Half of the layers of most models have a sliding window."""
    two_layers = text.startswith(("lukv", "per_layer"))  # as many as the policy's text has numbers for
    params = decoder(windows=(None, None) if two_layers else (None, 16) * 2, gates=True)
    by_layers: list[bool] = []
    after: list[bool] = []
    expected = both_turns(params, text)

    def pays(*given: Any) -> bool:
        by_layers.append(layerwise.pays(*given))
        return by_layers[-1]

    def layers_pay(*given: Any) -> bool:
        after.append(layerwise.layers_pay(*given))
        return after[-1]

    monkeypatch.setattr(sys.modules["kvjax.prefill"], "pays", pays)
    for module in ("kvjax.reading.replays", "kvjax.reading.allocate"):
        monkeypatch.setattr(sys.modules[module], "layers_pay", layers_pay)
    monkeypatch.setattr(layerwise, "DEEP", 2)
    found = both_turns(params, text)
    assert_same(found[0], expected[0])
    assert_same(found[1], expected[1])
    assert found[2] == expected[2]
    if "kvcompose" in text:
        assert all(by_layers)  # turns over a pool, too
    if text in MIXED:
        assert by_layers[0] is ("pyramidkv" not in text)  # its layers differ in size
    if text == REPLAYED or text.startswith("kvcompose"):
        assert len(after) == 4  # the replay and the allocation, of two prompts
        assert all(after)


@pytest.mark.slow
def test_a_deep_model_compiles_the_programs_of_one_layer(compiled: list[str]) -> None:
    kvjax.prefill(decoder(windows=(None,) * layerwise.DEEP), ROWS, policy="snapkv:budget=12,window=4")
    assert [name for name in compiled if "read" in name] == ["jit(_read_layer)"]
    compiled.clear()
    kvjax.prefill(decoder(windows=(None,) * (layerwise.DEEP - 1)), ROWS, policy="snapkv:budget=12,window=4")
    assert [name for name in compiled if "read" in name] == ["jit(read)"]


@pytest.mark.slow
def test_a_turn_into_a_pool_has_the_programs_of_one_layer(compiled: list[str]) -> None:
    """And leaves the cache that it extends as it is."""
    params, text = decoder(windows=(None,) * layerwise.DEEP), "adakv:base=snapkv,base.budget=10,base.window=4"
    cache = kvjax.prefill(params, ROWS, policy=text)
    before = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
    compiled.clear()
    turns = [kvjax.prefill(params, TURN, cache=cache) for _ in range(2)]
    assert [name for name in compiled if "read" in name] == ["jit(_read_layer)"]
    assert_same(*turns)
    for leaf, expected in zip(jax.tree.leaves(cache), before, strict=True):
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.slow
def test_the_first_layers_of_a_deep_model_retain_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    params, text = decoder(windows=(None,) * 2 * layerwise.DEEP), "morphkv:budget=12,window=4,dense_layers=2"
    found = kvjax.prefill(params, ROWS, policy=text)
    assert found.entries.bounds[:3] == (48, 48, 12)
    monkeypatch.setattr(layerwise, "DEEP", 100)
    assert_same(found, kvjax.prefill(params, ROWS, policy=text))


@pytest.mark.slow
def test_a_deep_model_replays_with_the_programs_of_one_layer(compiled: list[str]) -> None:
    kvjax.prefill(decoder(windows=(None,) * layerwise.DEEP), ROWS, policy="kvcompose:budget=12")
    # The hidden states behind the last layer are not computed.
    assert [name for name in compiled if "replay" in name] == ["jit(_replay_layer)"] * 2
    compiled.clear()
    kvjax.prefill(decoder(windows=(None,) * (layerwise.DEEP - 1)), ROWS, policy="kvcompose:budget=12")
    assert [name for name in compiled if "replay" in name] == ["jit(replay)"]


@pytest.mark.slow
def test_a_deep_model_allocates_with_the_programs_of_one_layer(compiled: list[str]) -> None:
    steps = ["jit(_ranked)", "jit(_counted)", "jit(_size)", "jit(_empty)", "jit(_put)"]
    text = "adakv:base=snapkv,base.budget=12,base.window=4"
    kvjax.prefill(decoder(windows=(None,) * layerwise.DEEP), ROWS, policy=text)
    assert [name for name in compiled if name in steps] == steps
    compiled.clear()
    kvjax.prefill(decoder(windows=(None,) * (layerwise.DEEP - 1)), ROWS, policy=text)
    assert [name for name in compiled if name in (*steps, "jit(allocate)")] == ["jit(allocate)"]

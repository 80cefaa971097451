"""`prefill_each` reads a prompt once and gives the caches that `prefill` gives under each policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.policies import parse
from kvjax.policy import Policy
from kvjax.runtime.clock import Clock
from tests.policy.presets import ALL, layers_of
from tests.tiny import VOCAB, decoder, held

ROWS = [np.random.default_rng(b).integers(0, VOCAB, n) for b, n in enumerate((40, 23, 3))]
MIXED = (
    "full",
    "h2o:budget=0.5,recent=2,group=max",
    "snapkv:budget=8,window=4",
    "pyramidkv:budget=12,window=4,beta=2",
    "morphkv:budget=12,window=4",
    "criticalkv:base=h2o,base.budget=12,base.recent=3",
    "kvmerger:budget=0.5,merge.theta=0.3",
    "dynamickv:budget=8,window=4",
    "kvcompose:budget=0.25",
    "think:ratio=0.5,window=4,recent=3",
    "zipcache:base=pyramidkv,base.budget=12,base.window=4,base.beta=2,window=4,queries=3",
)


OF_FOUR_LAYERS = [text for text in ALL if layers_of(text, 2) == 4]
OTHERS = [text for text in ALL if layers_of(text, 2) == 2]
# The programs of more policies at once take more memory maps than a process may have.
PARTS = [(OF_FOUR_LAYERS, 4), *((OTHERS[i : i + 12], 2) for i in range(0, len(OTHERS), 12))]


def assert_same(ours: kvjax.KVCache, theirs: kvjax.KVCache) -> None:
    """Asserts that two caches have the same form, and in each slot the same entry and state, bit by bit."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(one, other)


def alike(texts: Sequence[str]) -> list[list[Policy]]:
    """The policies of these texts, in groups that read a prompt alike."""
    groups: dict[tuple[Any, Any], list[Policy]] = {}
    for policy in map(parse, texts):
        groups.setdefault((policy.positions, policy.storage), []).append(policy)
    return list(groups.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "layers"), [(MIXED, 2), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in PARTS)]
)
def test_each_is_what_prefill_gives(texts: Sequence[str], layers: int) -> None:
    """Rows of different lengths are padded on the left. One of the layers has a sliding window."""
    params = decoder(windows=(None, 16, None, None)[:layers], gates=True)
    for policies in alike(texts):
        for policy, ours in zip(policies, kvjax.prefill_each(params, ROWS, policies=policies), strict=True):
            assert_same(ours, kvjax.prefill(params, ROWS, policy=policy))


@pytest.mark.long
def test_in_chunks() -> None:
    """In a layer with a sliding window, the tokens that it no longer sees take no part."""
    params, policies = (
        decoder(windows=(16,)),
        [parse(text) for text in ("h2o:budget=8", "snapkv:budget=12,window=4", "full")],
    )
    for policy, ours in zip(policies, kvjax.prefill_each(params, ROWS, policies=policies, chunk=16), strict=True):
        assert_same(ours, kvjax.prefill(params, ROWS, policy=policy, chunk=16))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "texts", [("h2o:budget=8", "dynamickv:budget=8,window=4"), ("snapkv:budget=0.5,window=4", "full")]
)
def test_a_prompt_that_was_begun(texts: tuple[str, ...]) -> None:
    """A document is read once, and each of two questions is read after it under several policies."""
    params, policies = decoder(), [parse(text) for text in texts]
    text = kvjax.begin_each(params, ROWS, policies=policies)
    for question in ([[1, 2], [3, 4, 5], [6]], [[7], [8], [9, 10]]):
        whole = [[*row, *more] for row, more in zip(ROWS, question, strict=True)]
        for policy, ours in zip(
            policies, kvjax.prefill_each(params, question, cache=text, policies=policies), strict=True
        ):
            theirs = kvjax.prefill(params, whole, policy=policy)
            for row in range(len(ROWS)):
                assert held(ours, row) == held(theirs, row)


def test_caches_that_cannot_be_gone_on_from() -> None:
    params, policy, other = decoder(), parse("h2o:budget=8"), parse("snapkv:budget=8,window=4")
    expected = "the cache was not read for these policies: expected one of begin_each with the same policies"
    for cache in (kvjax.prefill(params, ROWS, policy=policy), kvjax.begin_each(params, ROWS, policies=[policy])):
        with pytest.raises(ValueError, match=expected):
            kvjax.prefill_each(params, ROWS, cache=cache, policies=[policy, other])
    with pytest.raises(ValueError, match="expected a prompt that is read in one call"):
        kvjax.begin_each(params, ROWS, policies=["kvcompose:budget=8"])
    for call in (kvjax.begin_each, kvjax.prefill_each):
        with pytest.raises(ValueError, match=r"policies=\[\]: expected at least one policy"):
            call(params, ROWS, policies=[])
    begun = kvjax.begin_each(params, ROWS, policies=[policy, other])
    more = [[1], [2], [3]]
    for go_on in (
        lambda: kvjax.generate(params, more, cache=begun, max_new_tokens=2),
        lambda: kvjax.prefill(params, more, cache=begun, compress="end"),
        lambda: kvjax.extend(params, begun, np.array(more)),
    ):
        with pytest.raises(ValueError, match="read for several policies: expected a call of prefill_each"):
            go_on()


class Counting(Clock):
    """Counts the calls of each function."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def run(self, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.runs[function.__name__] += 1
        return super().run(name, function, *args, **kwargs)


@pytest.mark.slow
def test_layers_are_read_once_and_share_programs(compiled: list[str]) -> None:
    """A deep model compiles what a shallow one does, also for budgets that differ between its layers."""
    texts = [f"{name}:budget={n},window=4" for name in ("snapkv", "pyramidkv") for n in (8, 12, 16)]
    programs = []
    for layers in (2, 5):
        params = decoder(windows=(None,) * layers, vocab=VOCAB + 1)
        compiled.clear()
        clock = Counting()
        caches = list(kvjax.prefill_each(params, ROWS, policies=texts, clock=clock))
        assert [cache.entries[0].slots for cache in caches[:3]] == [8, 12, 16]
        assert clock.runs == {"read_to_end": 1}
        programs.append(Counter(name for name in compiled if name in ("jit(_read_layers)", "jit(_compress_layer)")))
    assert programs == [{"jit(_read_layers)": 1, "jit(_compress_layer)": 1}, {}]


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize(
    ("data", "model"), [(2, 2), *(pytest.param(*shape, marks=pytest.mark.exhaustive) for shape in ((2, 1), (1, 4)))]
)
def test_on_a_mesh(data: int, model: int) -> None:
    rows, texts = (
        [*ROWS, ROWS[0]],
        ("h2o:budget=8", "pyramidkv:budget=12,window=4,beta=2", "kvcompose:budget=8", "full"),
    )
    params = decoder(8, 4, windows=(None, None))
    sharded = kvjax.shard(params, kvjax.make_mesh(data, model))
    for ours, theirs in zip(
        kvjax.prefill_each(sharded, rows, policies=texts),
        kvjax.prefill_each(params, rows, policies=texts),
        strict=True,
    ):
        assert ours.mesh is not None
        for row in range(len(rows)):
            assert held(ours, row) == held(theirs, row)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ("streaming_llm:budget=8,positions=in_cache", "positions"),
        ("quantize:policy=h2o,policy.budget=8", "storage"),
    ],
)
def test_policies_that_do_not_read_alike(other: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"differ in their {name} .*expected the same for all"):
        list(kvjax.prefill_each(decoder(), ROWS, policies=[parse("h2o:budget=8"), parse(other)]))


def test_a_policy_that_does_not_fit_the_model() -> None:
    with pytest.raises(ValueError, match="groups=3 of 2 kv heads"):
        kvjax.prefill_each(decoder(), ROWS, policies=["full", "adakv:base=h2o,base.budget=40,groups=3"])

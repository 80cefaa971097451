"""`prefill_each` reads a prompt once and gives the caches that `prefill` gives under each policy."""

from __future__ import annotations

import importlib

import jax
import numpy as np
import pytest

import kvjax
from kvjax.policies import parse
from tests.tiny import VOCAB, decoder, held

ROWS = [np.random.default_rng(b).integers(0, VOCAB, n) for b, n in enumerate((40, 23, 3))]
SWEEPS = (
    ("h2o:budget=8", "h2o:budget=0.5,recent=2", "h2o:budget=64"),
    ("snapkv:budget=8,window=4", "snapkv:budget=0.6,window=4", "pyramidkv:budget=12,window=4,beta=2"),
    ("morphkv:budget=12,window=4", "morphkv:budget=20,window=4"),
    ("kvmerger:budget=12,recent=4,merge.heavy=2,merge.theta=None", "kvmerger:budget=0.5,merge.theta=0.3"),
    ("dynamickv:budget=8,window=4", "dynamickv:budget=16,window=4"),
    ("kvcompose:budget=8", "kvcompose:budget=0.5,structured=False", "kvcompose:budget=0.25"),
    (
        "kvzip:budget=0.5,score.instruction='',score.starting='',score.suffix=''",
        "kvzip:budget=0.2,score.instruction='',score.starting='',score.suffix=''",
    ),
    ("criticalkv:base=snapkv,base.budget=8,base.window=4", "criticalkv:base=snapkv,base.budget=16,base.window=4"),
    (
        "quantize:policy=snapkv,policy.budget=8,policy.window=4",
        "quantize:policy=snapkv,policy.budget=12,policy.window=4",
    ),
    ("streaming_llm:budget=8,positions=in_cache", "streaming_llm:budget=12,positions=in_cache,every=2"),
)


def assert_same(ours: kvjax.KVCache, theirs: kvjax.KVCache) -> None:
    """Asserts that two caches have the same form and in each slot the same entry, with the same state."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, atol=1e-5)


CHOSEN = (0, 4, 5, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "texts", [pytest.param(x, marks=[] if i in CHOSEN else pytest.mark.exhaustive) for i, x in enumerate(SWEEPS)]
)
def test_each_is_what_prefill_gives(texts: tuple[str, ...]) -> None:
    params, policies = decoder(windows=(None, 16)), [parse(text) for text in texts]
    for policy, ours in zip(policies, kvjax.prefill_each(params, ROWS, policies=policies), strict=True):
        assert_same(ours, kvjax.prefill(params, ROWS, policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize("texts", [SWEEPS[0][:2], pytest.param(SWEEPS[4], marks=pytest.mark.exhaustive)])
def test_a_prompt_that_was_begun(texts: tuple[str, ...]) -> None:
    """A document is read once, and each of two questions is read after it under several policies."""
    params, policies = decoder(), [parse(text) for text in texts]
    text = kvjax.prefill(params, ROWS, policy=policies[0], compress="never")
    for question in ([[1, 2], [3, 4, 5], [6]], [[7], [8], [9, 10]]):
        whole = [[*row, *more] for row, more in zip(ROWS, question, strict=True)]
        for policy, ours in zip(
            policies, kvjax.prefill_each(params, question, cache=text, policies=policies), strict=True
        ):
            theirs = kvjax.prefill(params, whole, policy=policy)
            for row in range(len(ROWS)):
                assert held(ours, row) == held(theirs, row)


@pytest.mark.slow
def test_caches_that_cannot_be_gone_on_from() -> None:
    params, policy = decoder(), parse("h2o:budget=8")
    with pytest.raises(ValueError, match='expected one that was read with compress="never"'):
        list(kvjax.prefill_each(params, ROWS, cache=kvjax.prefill(params, ROWS, policy=policy), policies=[policy]))
    replays = parse("kvcompose:budget=8")
    begun = kvjax.prefill(params, ROWS, policy=replays, compress="never")
    with pytest.raises(ValueError, match="expected a prompt that is read in one call"):
        list(kvjax.prefill_each(params, ROWS, cache=begun, policies=[replays]))


@pytest.mark.slow
def test_the_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    module = importlib.import_module("kvjax.prefill_each")  # the attribute of that name is the function
    read = module.read_request

    def counted(*args, **options):
        reads.append(1)
        return read(*args, **options)

    monkeypatch.setattr(module, "read_request", counted)
    caches = kvjax.prefill_each(decoder(), ROWS, policies=[parse(f"knorm:budget={n}") for n in (4, 8, 12)])
    assert [cache.entries[0].slots for cache in caches] == [4, 8, 12]
    assert reads == [1]
    assert list(kvjax.prefill_each(decoder(), ROWS, policies=[])) == []


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("name", ["h2o", "kvcompose"])
def test_on_a_mesh(name: str) -> None:
    rows, policies = [*ROWS, ROWS[0]], [parse(f"{name}:budget=8")]
    params = decoder(8, 4)
    sharded = kvjax.shard(params, kvjax.make_mesh(2, 4))
    for ours, theirs in zip(
        kvjax.prefill_each(sharded, rows, policies=policies),
        kvjax.prefill_each(params, rows, policies=policies),
        strict=True,
    ):
        for row in range(len(rows)):
            assert held(ours, row) == held(theirs, row)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ("snapkv:budget=8,window=4", "score"),
        ("h2o:budget=8,every=None", "every"),
        ("quantize:policy=h2o,policy.budget=8", "storage"),
    ],
)
def test_policies_that_do_not_read_alike(other: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"differ in their {name} .*expected policies that differ in budget"):
        list(kvjax.prefill_each(decoder(), ROWS, policies=[parse("h2o:budget=8"), parse(other)]))

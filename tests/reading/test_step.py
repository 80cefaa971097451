"""Layers of a kind are traced once, and give what each of them gives among the entries of all layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attend import Stepping
from kvjax.kv_cache import KVCache
from kvjax.mesh.experts import over_experts
from kvjax.models import Decoder
from kvjax.policies import parse
from kvjax.policy import ScoreWrapper
from kvjax.reading.layers import step
from kvjax.reading.room import with_room
from tests.test_prefill_each import MIXED, assert_same
from tests.tiny import VOCAB, decoder

ROWS = [np.random.default_rng(b).integers(0, VOCAB, n) for b, n in enumerate((40, 23, 3))]
DENSE = "morphkv:budget=12,window=4,dense_layers=1"  # the first layer retains everything, and the others evict
POOLS = ("adakv:base=h2o,base.budget=12,base.recent=3", "d2o:budget=20")
TOKENS = jnp.arange(15).reshape(5, 3)
INCOMING = jnp.array([True, True, False])
TRACED: Counter[bool] = Counter()


def among_all(params: Decoder, cache: KVCache, tokens: Any, incoming: Any) -> tuple[Any, KVCache]:
    """What `step` returns, from an attention function that is shown the entries of all layers."""
    attention = Stepping(cache.policy, cache.policy.limits(len(cache.entries)))
    attend = attention(cache.length, incoming, rope=cache.rope)
    hidden, entries = params(tokens[:, None], attend, cache.entries, over_experts(None))
    return params.logits(hidden[:, 0]), replace(cache, entries=entries, length=cache.length + incoming)


@partial(jax.jit, static_argnums=0)
def steps(one: Callable[..., Any], params: Decoder, cache: KVCache) -> tuple[KVCache, Any]:
    """The cache after a step for each of TOKENS, and the logits of all steps."""

    def advance(cache: KVCache, tokens: Any) -> tuple[KVCache, Any]:
        logits, cache = one(params, cache, tokens, INCOMING)
        return cache, logits

    return jax.lax.scan(advance, cache, TOKENS)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("text", [*MIXED, DENSE, *POOLS])
def test_a_step_is_one_of_all_layers_together(text: str) -> None:
    """Rows of different lengths are padded on the left, one of them has no token, and two layers have a window."""
    params = decoder(windows=(None, 16) * 2, gates=True)
    cache = with_room(kvjax.prefill(params, ROWS, policy=text), len(TOKENS))
    (ours, logits), (theirs, expected) = (steps(one, params, cache) for one in (step, among_all))
    assert_same(ours, theirs)
    np.testing.assert_array_equal(logits, expected)


@dataclass(frozen=True)
class Counted(ScoreWrapper):
    """Its base, which counts how often it is traced, and where."""

    def observe(self, entries: Any, attended: Any) -> Any:
        TRACED[attended.decoding] += 1
        return self.base.observe(entries, attended)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["h2o:budget=12", DENSE, POOLS[0]])
def test_a_program_traces_each_kind_of_layer_once(text: str) -> None:
    """Layers are of two kinds, with a window and without. A layer that retains everything observes nothing."""
    policy = parse(text)
    policy = replace(policy, score=Counted(policy.score))
    TRACED.clear()
    kvjax.generate(decoder(windows=(None, 16) * 3), ROWS, policy=policy, max_new_tokens=20)
    assert TRACED == {False: 2, True: 2}

"""A planned cache has the bytes and the shapes of the cache that `generate` makes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models import Decoder, DecoderConfig, Rope
from tests.products import part

CONFIG = DecoderConfig(
    family="mistral",
    vocab_size=64,
    hidden_size=32,
    mlp_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    windows=(None, 24),
    rope=Rope(1e4),
    max_positions=512,
)


@pytest.fixture(scope="module")
def params() -> Decoder:
    return Decoder(CONFIG, nnx.Rngs(0))


DISTINCT = (
    "full",
    "streaming_llm:budget=20,positions=in_cache,every=4",
    "h2o:budget=20,every=None",
    "morphkv:budget=0.3,window=8,every=4,dense_layers=1",
    "quantize:policy=h2o,policy.budget=20,bits=4",
)
ALIKE = (
    "streaming_llm:budget=20",
    "h2o:budget=20",
    "tova:budget=0.25",
    "snapkv:budget=20,window=8",
    "morphkv:budget=20,window=8",
)


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("text", part((*DISTINCT, *ALIKE), DISTINCT))
def test_planned_bytes_are_the_bytes_of_generate(params: Decoder, text: str) -> None:
    policy = kvjax.policies.parse(text)
    prompts = np.random.default_rng(0).integers(0, 64, (2, 70))
    out = kvjax.generate(params, prompts, policy=policy, max_new_tokens=5)
    planned = kvjax.plan_cache(CONFIG, policy, batch=2, length=70, new_tokens=5, dtype=np.float32)
    assert planned.nbytes == out.cache.nbytes == out.stats.cache_bytes
    assert [leaf.shape for leaf in jax.tree.leaves(planned)] == [leaf.shape for leaf in jax.tree.leaves(out.cache)]


def test_the_full_cache_by_hand() -> None:
    cache = kvjax.plan_cache(CONFIG, kvjax.policies.full(), batch=3, length=96, new_tokens=64, dtype="bfloat16")
    slots = (96 + 64, 24)  # the second layer's window
    entries = 3 * 2 * sum(slots)
    capacities = 3 * 2 * 4 * 2
    assert cache.nbytes == entries * (2 * 8 * 2 + 4) + capacities


@pytest.mark.parametrize("name", ["batch", "length", "new_tokens"])
def test_sizes_below_one_are_refused(name: str) -> None:
    sizes = {"batch": 1, "length": 1, "new_tokens": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0: expected an integer in 1 \\.\\. 2147483647"):
        kvjax.plan_cache(CONFIG, kvjax.policies.full(), **sizes, dtype="float32")


def test_sizes_of_numpy(params: Decoder) -> None:
    sizes = {"batch": np.int8(1), "length": np.int8(100), "new_tokens": np.uint8(100)}
    policy, dtype = kvjax.policies.h2o(20, every=None), "float32"
    ours = kvjax.plan_cache(CONFIG, policy, **sizes, dtype=dtype)
    theirs = kvjax.plan_cache(CONFIG, policy, batch=1, length=100, new_tokens=100, dtype=dtype)
    assert jax.tree.leaves(ours) == jax.tree.leaves(theirs)

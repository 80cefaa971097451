"""Layers with a window that have kv heads of another number and size, as those of Gemma 4."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.gates.files import Gates
from kvjax.inspection import record
from kvjax.models import Decoder, KvHeads, Rope
from tests.models.everything import LENGTHS, NEW, ROWS, assert_full_within_budget, everything
from tests.tiny import decoder, random_gates

OTHER = KvHeads(4, 16)  # beside 2 of 8 channels
PROMPTS = np.random.default_rng(0).integers(0, 64, (8, 40))


@cache
def two_kinds() -> Decoder:
    """Three layers of 8 query heads: 4 kv heads of 16 channels in the first two, which have windows, 2 of 8 behind."""
    config = decoder(heads=8, kv_heads=2, windows=(24, 16, None)).config
    return Decoder(replace(config, window_heads=OTHER, window_rope=Rope(100.0)), nnx.Rngs(0))


@pytest.mark.long
@pytest.mark.slow(first=1)
def test_policies(policy):
    params = everything(window_heads=OTHER)
    if policy.allocates:
        with pytest.raises(ValueError, match="kv heads of several kinds, 4 of 16 channels and 2 of 8 channels"):
            kvjax.generate(params, ROWS, policy=policy, max_new_tokens=NEW)
        return
    cache = assert_full_within_budget(params, policy)
    sizes = {"batch": len(ROWS), "length": max(LENGTHS), "new_tokens": NEW}
    assert cache.nbytes == kvjax.plan_cache(params.config, policy, **sizes, dtype="float32").nbytes
    assert [layer.keys.shape[1::2] for layer in cache.entries] == [(4, 16), (2, 8)]


def test_bytes_by_hand():
    config = two_kinds().config
    assert config.bytes_per_token("bfloat16") == 2 * 2 * (4 * 16 + 4 * 16 + 2 * 8)
    cache = kvjax.plan_cache(config, kvjax.policies.full(), batch=3, length=96, new_tokens=64, dtype="bfloat16")
    slots = 24 * 4, 16 * 4, 160 * 2  # of all heads of a layer
    entries = sum(n * (2 * 2 * D + 4) for n, D in zip(slots, (16, 16, 8), strict=True))
    assert cache.nbytes == 3 * (entries + 4 * (4 + 4 + 2))  # a head has a capacity


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("text", ["h2o:budget=20", "full"])
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_mesh(text):
    """The tokens, retained entries and bytes are those of one device."""
    options = {"policy": text, "max_new_tokens": NEW, "log_probs": True}
    one = kvjax.generate(two_kinds(), PROMPTS, **options)
    many = kvjax.generate(kvjax.shard(two_kinds(), kvjax.make_mesh(data=4, model=2)), PROMPTS, **options)
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_allclose(many.log_probs, one.log_probs, atol=1e-5)
    np.testing.assert_array_equal(many.cache.retained_mask(), one.cache.retained_mask())
    assert many.cache.nbytes == one.cache.nbytes


def test_meshes_that_share_heads_in_some_layers_are_refused():
    with pytest.raises(ValueError, match=r"model=4 does not fit 8 query heads, 4 or 2 kv heads .* are 1, 2$"):
        kvjax.plan_cache(
            two_kinds().config,
            kvjax.policies.full(),
            **{"batch": 2, "length": 9, "new_tokens": 1, "dtype": "float32"},
            mesh=kvjax.make_mesh(data=1, model=4),
        )


@pytest.mark.long
def test_engine_and_saved_cache(tmp_path):
    params, text = two_kinds(), "snapkv:budget=20,window=4"
    expected = kvjax.generate(params, PROMPTS[:1], policy=text, max_new_tokens=NEW)
    with kvjax.Engine(params, policy=text, rows=2, max_prompt=64, max_new_tokens=NEW) as engine:
        answer = engine.submit(PROMPTS[0], max_new_tokens=NEW).result()
    np.testing.assert_array_equal(answer.tokens, expected.tokens[0])
    kvjax.save_cache(tmp_path / "cache", expected.cache, params)
    again = kvjax.restore_cache(tmp_path / "cache", params)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(expected.cache), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.long
def test_retained_entries():
    cache = kvjax.prefill(two_kinds(), PROMPTS[:1], policy="snapkv:budget=20,window=4")
    mask = cache.retained_mask()
    assert mask.shape == (1, 3, 4, 40)
    assert not mask[0, 2, 2:].any()
    np.testing.assert_array_equal(np.flatnonzero(mask[0, 2, 1]), cache.retained(2, 1))
    assert len(cache.retained(0, 3)) == 20
    with pytest.raises(ValueError, match="head"):
        cache.retained(2, 2)
    assert "3 x 4 or 2 heads" in repr(cache)


@pytest.mark.long
def test_a_recording_has_the_heads_of_each_layer():
    text, prompt = "h2o:budget=20", PROMPTS[0].tolist()
    recording = record(two_kinds(), prompt, policy=text, max_new_tokens=3)
    cache = kvjax.generate(two_kinds(), prompt, policy=text, max_new_tokens=3).cache
    np.testing.assert_array_equal(recording.held(2), cache.retained_mask()[0])
    assert (recording.left[2, 2:] == -1).all()
    assert (recording.left[2, :2] >= 0).all()


@pytest.mark.long
def test_a_cache_of_another_model_is_refused():
    cache = kvjax.prefill(two_kinds(), PROMPTS[:1])
    other = decoder(heads=8, kv_heads=2, windows=(24, 16, None))
    with pytest.raises(ValueError, match=r"\(2, 4, 16\) and \(1, 2, 8\): the model needs \(3, 2, 8\)"):
        kvjax.generate(other, None, cache=cache, max_new_tokens=1)


def test_gates_and_statistics_are_refused():
    params = two_kinds()
    gates: Gates = next(iter(random_gates(3, 2, 4)))
    with pytest.raises(
        ValueError, match="gates for layers with kv heads of several kinds, 4 of 16 channels and 2 of 8"
    ):
        kvjax.with_gates(params, gates)
    with pytest.raises(ValueError, match="statistics for layers with kv heads of several kinds"):
        kvjax.with_statistics(params, {"query_mean": np.zeros((3, 8, 8), np.float32)})

"""Caches on disk: a restored cache equals the saved one, and is refused for another model or policy."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.models import Decoder
from tests.test_generate import NEW as GENERATE_NEW  # its programs serve here
from tests.test_generate import ROWS as GENERATE_ROWS
from tests.tiny import decoder

RNG = np.random.default_rng(4)
ROWS = [RNG.integers(0, 99, n).tolist() for n in (44, 5)]


def assert_equal(ours: kvjax.KVCache, theirs: kvjax.KVCache) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)  # the policy and other static facts included
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_round_trip_of_an_answer(tiny: Decoder, policy: kvjax.Policy, tmp_path: Path) -> None:
    options = {"max_new_tokens": GENERATE_NEW, "log_probs": True}
    cache = kvjax.generate(tiny, GENERATE_ROWS, policy=policy, **options).cache
    kvjax.save_cache(tmp_path / "cache", cache, tiny)
    restored = kvjax.restore_cache(str(tmp_path / "cache"), tiny, policy=policy)
    assert_equal(restored, cache)
    expected = kvjax.generate(tiny, None, cache=cache, **options).tokens
    np.testing.assert_array_equal(kvjax.generate(tiny, None, cache=restored, **options).tokens, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_round_trip_of_half_a_document(tiny: Decoder, tmp_path: Path, dtype) -> None:
    params = jax.tree.map(lambda x: x.astype(dtype), tiny)
    policy = kvjax.policies.snapkv(24, window=4)
    cache = kvjax.prefill(params, ROWS, policy=policy, compress="never")
    kvjax.save_cache(tmp_path / "cache", cache, params)
    restored = kvjax.restore_cache(tmp_path / "cache", params)
    assert_equal(restored, cache)
    assert not restored.filled


@pytest.fixture(scope="module")
def saved(tiny: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "cache"
    kvjax.save_cache(path, kvjax.prefill(tiny, ROWS, policy=kvjax.policies.h2o(24)), tiny)
    return path


@pytest.mark.slow
def test_another_policy(tiny: Decoder, saved: Path) -> None:
    with pytest.raises(ValueError, match=r"was made by Policy\(.*entries=24.*, not by Policy\(.*entries=25"):
        kvjax.restore_cache(saved, tiny, policy=kvjax.policies.h2o(25))


@pytest.mark.slow
def test_another_model(tiny: Decoder, saved: Path) -> None:
    """A model with one other weight, or with another configuration around the same weights, is refused."""
    one_number = jax.tree.map(lambda x: x, tiny)
    one_number.norm.scale[...] = one_number.norm.scale[...].at[3].add(1e-6)
    swapped = jax.tree.map(lambda x: x, tiny)
    swapped.embed[...] = swapped.embed[...][::-1]
    other_config = jax.tree.map(lambda x: x, tiny)
    other_config.config = replace(tiny.config, max_positions=8192)
    for params in (one_number, swapped, other_config, Decoder(tiny.config, nnx.Rngs(1))):
        with pytest.raises(ValueError, match="another model"):
            kvjax.restore_cache(saved, params)
    kvjax.restore_cache(saved, jax.tree.map(lambda x: x.copy(), tiny))


def test_no_cache(tiny: Decoder, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match="holds no saved cache: expected a folder written by save_cache"):
            kvjax.restore_cache(path, tiny)


def test_nothing_is_overwritten(tiny: Decoder, saved: Path) -> None:
    with pytest.raises(ValueError, match=r"cache is not empty, it holds .* overwrite=True"):
        kvjax.save_cache(saved, kvjax.prefill(tiny, [1, 2]), tiny)
    kvjax.restore_cache(saved, tiny)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_onto_another_mesh(tmp_path: Path) -> None:
    """A cache moves from a mesh with two devices per kv head to one with one, and to a single device."""
    params, policy = decoder(heads=4, kv_heads=2), kvjax.policies.morphkv(24, window=4)
    sharded, other = (kvjax.shard(params, kvjax.make_mesh(*size)) for size in ((2, 4), (1, 2)))
    rows = [*ROWS, ROWS[0][:20], ROWS[0][:30]]
    rows = [[token % 64 for token in row] for row in rows]
    cache = kvjax.generate(sharded, rows, policy=policy, max_new_tokens=8).cache
    kvjax.save_cache(tmp_path / "cache", cache, sharded)
    expected = kvjax.generate(sharded, None, cache=cache, max_new_tokens=8).tokens
    for target in (sharded, other, params):
        restored = kvjax.restore_cache(tmp_path / "cache", target)
        for one, two in zip(jax.tree.leaves(restored), jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(kvjax.generate(target, None, cache=restored, max_new_tokens=8).tokens, expected)
    wide = kvjax.shard(params, kvjax.make_mesh(data=8))
    with pytest.raises(ValueError, match="a batch of 4 rows on a mesh of data=8: expected multiples of 8 rows"):
        kvjax.restore_cache(tmp_path / "cache", wide)

"""Caches on disk: a restored cache equals the saved one, and is refused for another model or policy."""

from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.files.saved_caches import check_described
from kvjax.models import Decoder
from tests.policy.presets import ALL
from tests.test_generate import ROWS as GENERATE_ROWS  # its programs serve here
from tests.test_generate import generate
from tests.tiny import decoder, random_statistics, step

RNG = np.random.default_rng(4)
ROWS = [RNG.integers(0, 99, n).tolist() for n in (44, 5, 33)]


def assert_equal(ours: kvjax.KVCache, theirs: kvjax.KVCache) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)  # the policy and other static facts included
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
@pytest.mark.slow(first=1)
def test_round_trip_of_an_answer(subject: Decoder, policy: kvjax.Policy, tmp_path: Path) -> None:
    cache = generate(subject, GENERATE_ROWS, policy=policy).cache
    kvjax.save_cache(tmp_path / "cache", cache, subject)
    assert_equal(kvjax.restore_cache(str(tmp_path / "cache"), subject, policy=policy), cache)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["full", "adakv:base=h2o,base.budget=24,groups=2"])
def test_a_restored_answer_goes_on(shallow: Decoder, text: str, tmp_path: Path, compiled: list[str]) -> None:
    """In layers that grow, and in a pool whose heads evict. The programs of the saved cache serve the restored one."""
    cache = generate(shallow, GENERATE_ROWS, policy=text).cache
    kvjax.save_cache(tmp_path / "cache", cache, shallow)
    restored = kvjax.restore_cache(tmp_path / "cache", shallow)
    expected = generate(shallow, None, cache=cache).tokens
    compiled.clear()
    np.testing.assert_array_equal(generate(shallow, None, cache=restored).tokens, expected)
    assert compiled == []


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_round_trip_of_half_a_document(shallow: Decoder, tmp_path: Path, dtype) -> None:
    params = jax.tree.map(lambda x: x.astype(dtype), shallow)
    policy = kvjax.policies.snapkv(24, window=4)
    cache = kvjax.prefill(params, ROWS, policy=policy, compress="never")
    kvjax.save_cache(tmp_path / "cache", cache, params)
    restored = kvjax.restore_cache(tmp_path / "cache", params)
    assert_equal(restored, cache)
    assert not restored.filled


@pytest.mark.long
@pytest.mark.parametrize("text", ["zipcache:base=knorm,base.budget=16", "think:recent=64"])
def test_round_trip_of_empty_arrays(shallow: Decoder, text: str, tmp_path: Path) -> None:
    """Nothing of a prompt is in slots under ZipCache, and of a short prompt nothing is settled under ThinK."""
    cache = kvjax.prefill(shallow, ROWS, policy=text)
    assert not all(leaf.size for leaf in jax.tree.leaves(cache))
    kvjax.save_cache(tmp_path / "cache", cache, shallow)
    restored = kvjax.restore_cache(tmp_path / "cache", shallow)
    assert_equal(restored, cache)
    ours, expected = (generate(shallow, [[3], [1], [4]], cache=one).tokens for one in (restored, cache))
    np.testing.assert_array_equal(ours, expected)


def test_round_trip_of_a_cache_before_its_prompt(shallow: Decoder, tmp_path: Path) -> None:
    cache = kvjax.empty_cache(shallow, kvjax.policies.snapkv(24, window=4), np.array([44, 5]))
    kvjax.save_cache(tmp_path / "cache", cache, shallow)
    assert_equal(kvjax.restore_cache(tmp_path / "cache", shallow), cache)


@dataclass(frozen=True)
class OfAScript(kvjax.Score):
    def __call__(self, entries, moment):
        return -entries.positions.astype(jnp.float32)


def test_a_policy_that_no_file_can_describe(shallow: Decoder, tmp_path: Path) -> None:
    """`restore_cache` could not read its cache, so none is written, by an engine either."""
    message = "cannot be restored from a file: .* unknown part OfAScript: expected one of kvjax.parts, or a part of a p"
    policy = replace(kvjax.policies.knorm(24), score=OfAScript())
    cache = kvjax.empty_cache(shallow, policy, np.array([3]))
    with pytest.raises(ValueError, match=message):
        kvjax.save_cache(tmp_path / "cache", cache, shallow)
    sizes = {"rows": 1, "max_prompt": 16, "max_new_tokens": 4}
    with pytest.raises(ValueError, match=message):
        kvjax.Engine(shallow, policy, **sizes, prefix_memory="1MB", prefix_folder=tmp_path / "prefixes")
    assert list(tmp_path.iterdir()) == []


def test_every_preset_is_described() -> None:
    for text in ALL:
        check_described(kvjax.policies.parse(text))


SAVED = kvjax.policies.morphkv(24, window=4, every=4)


@pytest.fixture(scope="module")
def saved(shallow: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "cache"
    kvjax.save_cache(path, kvjax.prefill(shallow, ROWS, policy=SAVED), shallow)
    return path


def test_another_policy(shallow: Decoder, saved: Path) -> None:
    with pytest.raises(ValueError, match=r"was made by Policy\(.*entries=24.*, not by Policy\(.*entries=25"):
        kvjax.restore_cache(saved, shallow, policy=kvjax.policies.morphkv(25, window=4, every=4))


def test_another_model(shallow: Decoder, saved: Path) -> None:
    """A model with one other weight, or with another configuration around the same weights, is refused."""
    one_number = jax.tree.map(lambda x: x, shallow)
    one_number.norm.scale[...] = one_number.norm.scale[...].at[3].add(1e-6)
    swapped = jax.tree.map(lambda x: x, shallow)
    swapped.embed[...] = swapped.embed[...][::-1]
    other_config = jax.tree.map(lambda x: x, shallow)
    other_config.config = replace(shallow.config, max_positions=8192)
    for params in (one_number, swapped, other_config, Decoder(shallow.config, nnx.Rngs(1))):
        with pytest.raises(ValueError, match="another model"):
            kvjax.restore_cache(saved, params)
    attached = kvjax.with_statistics(shallow, random_statistics(shallow.config))
    with pytest.raises(ValueError, match="with other weights, gates or statistics: expected the same parameters"):
        kvjax.restore_cache(saved, attached)
    kvjax.restore_cache(saved, jax.tree.map(lambda x: x.copy(), shallow))


def test_no_cache(shallow: Decoder, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match="holds no saved cache: expected a folder written by save_cache"):
            kvjax.restore_cache(path, shallow)


def test_paths_that_are_none(shallow: Decoder) -> None:
    for path, message in (("~nobody-has-this-name/x", "expected the home folder of a user"), ("a\0b", "of code 0")):
        with pytest.raises(ValueError, match=message):
            kvjax.restore_cache(path, shallow)


def test_nothing_is_overwritten(shallow: Decoder, saved: Path) -> None:
    other = kvjax.prefill(shallow, ROWS[::-1], policy=SAVED)
    with pytest.raises(ValueError, match=r"cache is not empty, it holds .* overwrite=True"):
        kvjax.save_cache(saved, other, shallow)
    kvjax.restore_cache(saved, shallow)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_onto_another_mesh(tmp_path: Path) -> None:
    """A cache moves from a mesh with two devices per kv head to one with one, and to a single device."""
    params, policy = decoder(heads=4, kv_heads=2), kvjax.policies.morphkv(24, window=4)
    sharded, other = (kvjax.shard(params, kvjax.make_mesh(*size)) for size in ((2, 4), (1, 2)))
    rows = [*ROWS, ROWS[0][:20]]
    rows = [[token % 64 for token in row] for row in rows]
    cache = kvjax.prefill(sharded, rows, policy=policy)
    tokens = np.array([3, 1, 4, 1], np.int32)
    cache = replace(cache, pending=cache.put_rows(tokens))
    kvjax.save_cache(tmp_path / "cache", cache, sharded)
    expected, _ = step(sharded, cache, cache.put_rows(tokens), cache.put_rows(tokens > 0))
    for target in (sharded, other, params):
        restored = kvjax.restore_cache(tmp_path / "cache", target)
        for one, two in zip(jax.tree.leaves(restored), jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(one, two)
        logits, _ = step(target, restored, restored.pending, restored.put_rows(tokens > 0))
        np.testing.assert_allclose(logits, expected, atol=1e-5)
    wide = kvjax.shard(params, kvjax.make_mesh(data=8))
    with pytest.raises(ValueError, match="a batch of 4 rows on a mesh of data=8: expected multiples of 8 rows"):
        kvjax.restore_cache(tmp_path / "cache", wide)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_onto_a_mesh_that_cuts_a_group(tmp_path: Path) -> None:
    params = decoder(heads=4, kv_heads=2)
    cache = kvjax.prefill(params, [[1, 2, 3, 4]] * 2, policy="adakv:base=h2o,base.budget=2,groups=1")
    kvjax.save_cache(tmp_path / "cache", cache, params)
    with pytest.raises(ValueError, match=r"groups=1 on a mesh with 2 devices .*expected a multiple of 2"):
        kvjax.restore_cache(tmp_path / "cache", kvjax.shard(params, kvjax.make_mesh(model=2)))

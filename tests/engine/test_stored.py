"""Stores of caches: what is found by its tokens, what leaves first, and what is on disk."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax.engine.sizes import Sizes
from kvjax.engine.stats import StoreCounts
from kvjax.engine.stored import CacheStore, Stored
from kvjax.files.saved_caches import OWNED
from kvjax.files.writing import new_folder
from kvjax.models import Decoder
from kvjax.policies import parse

POLICY = parse("h2o:budget=12")
SIZES = Sizes.of(1, 16, 8)


def on_host(params: Decoder) -> Stored:
    return Stored(3, jax.device_get(kvjax.prefill(params, [1, 2, 3], policy=POLICY)), np.array([5], np.int32))


def test_the_least_recently_used_cache_leaves(tiny: Decoder) -> None:
    one, two, three = (on_host(tiny) for _ in range(3))
    store = CacheStore(tiny, POLICY, SIZES, memory=2 * one.nbytes)
    texts = [np.arange(n) for n in (1, 2, 3)]
    keys = list(map(store.key, texts))
    assert len(set(keys)) == 3
    assert store.get(texts[0]) is None
    store.put(keys[0], one)
    store.put(keys[1], two)
    assert store.get(texts[0]) is one
    store.put(keys[2], three)
    assert store.get(texts[1]) is None
    assert store.get(texts[0]) is one
    assert (store.hits, store.misses, store.nbytes) == (2, 2, 2 * one.nbytes)
    assert store.use(keys[2])
    store.put(keys[1], two)
    assert not store.use(keys[0])


def test_the_last_used_caches_stay_on_the_devices(tiny: Decoder) -> None:
    """Two of them; the others go to the host, where one has room."""
    one, two, three, four = (on_host(tiny) for _ in range(4))
    store = CacheStore(tiny, POLICY, SIZES, memory=one.nbytes, on_devices=2)
    keys = [store.key(np.arange(n)) for n in (1, 2, 3, 4)]
    assert store.put(keys[0], one) is store.put(keys[1], two) is None
    assert (one.stays, two.stays, store.nbytes, store.device_nbytes) == (True, True, 0, 2 * one.nbytes)
    assert store.use(keys[0])
    assert store.put(keys[1], two) is None  # it is there
    assert store.put(keys[2], three) is two
    assert (one.stays, two.stays, three.stays) == (True, False, True)
    assert (store.nbytes, store.device_nbytes) == (one.nbytes, 2 * one.nbytes)
    assert store.put(keys[3], four) is one
    assert not store.use(keys[1])
    assert [store.get(np.arange(n)) for n in (1, 2, 3, 4)] == [one, None, three, four]
    assert store.counts == StoreCounts(3, 1, one.nbytes, 2 * one.nbytes)


def test_a_cache_that_is_larger_than_the_memory_is_not_stored(tiny: Decoder) -> None:
    one = on_host(tiny)
    store = CacheStore(tiny, POLICY, SIZES, memory=one.nbytes - 1)
    store.put(store.key(np.arange(3)), one)
    assert store.nbytes == 0
    assert store.longest(np.arange(9), 9) is None


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


@given(kept=st.lists(TOKENS, max_size=12), asked=TOKENS, most=st.integers(0, 6), places=st.integers(1, 12))
def test_the_longest_cache_that_begins_a_prompt(kept: list, asked: list, most: int, places: int) -> None:
    """Against a search through all that are kept, of which the oldest have left."""
    arrays = np.zeros((1, 4), np.int32)
    store = CacheStore(None, POLICY, SIZES, memory=places * arrays.nbytes)
    there: list[list[int]] = []
    for tokens in kept:
        store.put(store.key(np.array(tokens)), Stored(len(tokens), arrays))
        there = [*there, tokens][-places:] if tokens not in there else there
    fits = [tokens for tokens in there if len(tokens) <= most and asked[: len(tokens)] == tokens]
    found = store.longest(np.array(asked), most)
    assert (found and found[1].length) == max(map(len, fits), default=None)
    assert found is None or found[0] == store.key(np.array(asked[: found[1].length]))


def test_room_is_known_once_the_arrays_are_on_the_host(tiny: Decoder) -> None:
    cache = kvjax.prefill(tiny, [1, 2, 3], policy=POLICY)
    stored = Stored(3, cache, jax.numpy.array([5], np.int32))
    assert stored.takes(99)
    stored.stays = True
    stored.settle()
    assert not stored.takes(6)
    assert stored.cache is cache
    stored.stays = False
    stored.start()
    stored.settle()
    assert stored.takes(5)
    assert not stored.takes(6)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(stored.cache))
    assert stored.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))


def test_caches_on_disk_serve_later_engines(tiny: Decoder, tmp_path: Path) -> None:
    host = on_host(tiny)

    def store(sizes: Sizes = SIZES) -> CacheStore:
        return CacheStore(tiny, POLICY, sizes, memory=10**6, folder=tmp_path)

    key = store().key(np.arange(3))
    store().put(key, host)
    later = store()
    found = later.get(np.arange(3))
    assert found is not None
    assert found.length == 3
    assert jax.tree.structure(found.cache) == jax.tree.structure(host.cache)
    assert all(map(np.array_equal, jax.tree.leaves(found.cache), jax.tree.leaves(host.cache)))
    assert (later.hits, later.misses) == (1, 0)
    assert store(Sizes.of(1, 32, 8)).key(np.arange(3)) != key
    damaged = next(
        path for path in (tmp_path / key / "arrays").rglob("*") if path.is_file() and path.stat().st_size > 99
    )
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again = store()
    assert again.get(np.arange(3)) is None
    assert (again.hits, again.misses) == (0, 1)
    again.put(key, host)
    assert store().get(np.arange(3)) is not None


def test_engines_that_write_the_same_cache_at_a_time(tiny: Decoder, tmp_path: Path) -> None:
    """The second one leaves the first one's files alone, and has the cache in memory. So does one that reads it."""
    host, tokens = on_host(tiny), np.arange(3)
    store, later = (CacheStore(tiny, POLICY, SIZES, memory=10**6, folder=tmp_path) for _ in range(2))
    key = store.key(tokens)
    with new_folder(tmp_path / key, OWNED, "facts/metadata", overwrite=True) as first:
        first.mkdir()
        (first / "half").write_text("of it")
        assert later.get(tokens) is None
        store.put(key, host)
        assert store.get(tokens) is host
        assert (first / "half").exists()


def test_what_is_no_cache_on_disk_is_an_error_of_the_system(tiny: Decoder, tmp_path: Path) -> None:
    """The loop of an engine ends that request, and goes on."""
    store = CacheStore(tiny, POLICY, SIZES, memory=10**6, folder=tmp_path)
    key = store.key(np.arange(3))
    (tmp_path / key).write_text("a file")
    assert store.get(np.arange(3)) is None
    with pytest.raises(OSError, match="is a file: expected a folder"):
        store.put(key, on_host(tiny))

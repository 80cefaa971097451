"""Caches that requests may continue, by the tokens that they have seen.

A store holds one-row caches of one model and policy: some on the devices, and the others on the host. The least
recently used ones go first, from the devices to the host, and from the host for good.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from kvjax.checks import path_of
from kvjax.files.saved_caches import check_described, fingerprint, restore_on_host, save_cache
from kvjax.files.writing import BusyError, check_folder
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder
from kvjax.policy import Policy

from .sizes import Sizes
from .stats import StoreCounts


@dataclass(eq=False)
class Stored:
    """A cache that requests may continue. Its arrays may be on their way from the devices.

    Attributes:
        length: the number of tokens that it has seen.
        cache: one row; on devices, the same row for each part of the batch.
        free: the number of tokens for which it has room, int32. None until somebody has counted it.
        stays: whether the cache stays on the devices for now.
    """

    length: int
    cache: KVCache
    free: Int[Array, "B"] | Int[np.ndarray, "1"] | None = None
    stays: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of the row."""
        return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(self.cache))

    def start(self) -> None:
        """Starts to copy the arrays to the host."""
        for leaf in jax.tree.leaves((self.cache, self.free)):
            if not isinstance(leaf, np.ndarray):  # the room of a cache that has stayed may be known already
                leaf.copy_to_host_async()

    def settle(self) -> None:
        """Waits until the arrays are on the host, but for a cache that stays. On several hosts, all call it."""
        self.free = _on_host(self.free)
        if not self.stays:
            self.cache = _on_host(self.cache)

    def takes(self, count: int) -> bool:
        """Returns whether this number of tokens has room, and True as long as the host does not know it."""
        return not isinstance(self.free, np.ndarray) or count <= int(self.free[0])


def _on_host(tree: Any) -> Any:
    return jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else fetch(x)[:1], tree)


class CacheStore:
    """Caches of one row: the last used ones on the devices, if any, and at most `memory` bytes as NumPy arrays.

    Attributes:
        hits: the number of requests whose cache was there, in memory or on disk.
        misses: the number of requests whose cache was not there.
        nbytes: of the caches on the host.
        device_nbytes: of those on the devices.
    """

    def __init__(
        self,
        params: Decoder,
        policy: Policy,
        sizes: Sizes,
        *,
        memory: int,
        on_devices: int = 0,
        folder: str | Path | None = None,
    ) -> None:
        """Makes an empty store.

        Args:
            params: the model.
            policy: that compresses the caches.
            sizes: of the engine, which fix the shape of a row.
            memory: the most bytes on the host. A larger cache is not stored.
            on_devices: the most caches that stay on the devices.
            folder: where caches are also kept on disk, without a bound; None for memory alone.

        Raises:
            ValueError: for what is no path of a folder, and for a policy whose caches cannot be on disk.
        """
        if folder is not None:
            folder = path_of("prefix_folder", folder)
            check_described(policy)
            check_folder(folder, overwrite=True)
        self.hits = self.misses = self.nbytes = self.device_nbytes = 0
        self._params, self._memory, self._on_devices = params, memory, on_devices
        self._folder = folder
        model = "" if folder is None else fingerprint(params)  # in memory there is one model
        self._origin = hashlib.sha256(f"{model} {policy!r} {sizes}".encode()).digest()
        self._near: OrderedDict[str, Stored] = OrderedDict()  # those that stay on the devices
        self._far: OrderedDict[str, Stored] = OrderedDict()
        self._lengths: Counter[int] = Counter()  # of both
        self._lock = threading.Lock()

    def key(self, tokens: Int[np.ndarray, "N"]) -> str:
        """The name of a cache: a hash of the policy, the engine's sizes, the tokens, and for a folder the model."""
        return hashlib.sha256(self._origin + _bytes(tokens)).hexdigest()

    def longest(self, tokens: Int[np.ndarray, "N"], most: int) -> tuple[str, Stored] | None:
        """The cache in memory that has seen most of these tokens from the first on, at most `most`, and its key."""
        found, hashed, data, at = None, hashlib.sha256(self._origin), _bytes(tokens), 0
        with self._lock:
            for length in sorted(length for length in self._lengths if length <= most):
                hashed.update(data[4 * at : 4 * length])
                at, key = length, hashed.hexdigest()
                if (stored := self._near.get(key) or self._far.get(key)) is not None:
                    found = key, stored
        return found

    def use(self, key: str) -> bool:
        """Makes a cache in memory the most recently used one. Returns False if it is not there."""
        with self._lock:
            for entries in (self._near, self._far):
                if key in entries:
                    entries.move_to_end(key)
                    return True
            return False

    def get(self, tokens: Int[np.ndarray, "N"]) -> Stored | None:
        """The cache that has seen these tokens, in memory or on disk, which becomes the most recently used one.

        None without one.
        """
        key = self.key(tokens)
        found = (self._near.get(key) or self._far[key]) if self.use(key) else self._from_disk(key, tokens.size)
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self._keep(key, found)
        return found

    def put(self, key: str, stored: Stored) -> Stored | None:
        """Stores a cache, and returns the one that is to go to the host for it: this one, or one that has stayed.

        None if there is none to go. Raises OSError if the cache cannot be written to disk.
        """
        if self._folder is not None:
            try:
                save_cache(self._folder / key, stored.cache, self._params, overwrite=True)
            except BusyError:  # another engine is writing the same cache
                pass
            except ValueError as error:  # something else is in the way
                raise OSError(str(error)) from None
        return self._keep(key, stored)

    @property
    def counts(self) -> StoreCounts:
        """The counts until now."""
        return StoreCounts(self.hits, self.misses, self.nbytes, self.device_nbytes)

    def _keep(self, key: str, stored: Stored) -> Stored | None:
        with self._lock:
            if stored.nbytes > self._memory or key in self._near or key in self._far:
                return None
            self._lengths[stored.length] += 1
            if self._on_devices:
                stored.stays, self._near[key] = True, stored
                self.device_nbytes += stored.nbytes
                if len(self._near) <= self._on_devices:
                    return None
                key, stored = self._near.popitem(last=False)
                stored.stays = False
                self.device_nbytes -= stored.nbytes
            while self.nbytes + stored.nbytes > self._memory:
                _, old = self._far.popitem(last=False)
                self.nbytes -= old.nbytes
                self._lengths[old.length] -= 1
                self._lengths += Counter()  # without those of which there are none
            self._far[key] = stored
            self.nbytes += stored.nbytes
            return stored

    def _from_disk(self, key: str, length: int) -> Stored | None:
        """The cache that an engine wrote earlier; None for a damaged one, or one that is being written."""
        if self._folder is None or not (self._folder / key).is_dir():
            return None
        try:
            cache = restore_on_host(self._folder / key, self._params)
        except ValueError:
            return None
        return Stored(length, cache)


def _bytes(tokens: Int[np.ndarray, "N"]) -> bytes:
    return tokens.astype("<i4").tobytes()

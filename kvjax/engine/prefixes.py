"""Compressed prefixes on the host: a document or system prompt that is read once and serves many requests.

The store holds one-row caches by model, policy and tokens. The least recently used ones leave first.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections import OrderedDict
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Int

from kvjax.checks import check_path
from kvjax.files.saved_caches import fingerprint, restore_on_host, save_cache
from kvjax.files.writing import check_folder
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.policy import Policy

from .sizes import Sizes


def check_prefixes(policy: Policy) -> None:
    """Raises ValueError for a policy that compresses a prompt by its end, where the question would be."""
    if policy.asks_the_end:
        part = policy.score if policy.score.needs.asks_the_end else policy.storage
        raise ValueError(
            f"{type(part).__name__} looks at the last queries of a prompt, so the question must be a part of the "
            "prompt: expected a policy whose compression does not look at the question, such as kvzip, kvcompose, h2o, "
            "keydiff, knorm, streaming_llm or full, or an engine without prefix_memory"
        )


class PrefixStore:
    """Caches of one row, as NumPy arrays, at most `memory` bytes of them.

    Attributes:
        hits: the number of requests whose prefix was there, in memory or on disk.
        misses: the number of requests whose prefix had to be read.
        nbytes: of the caches in memory.
    """

    def __init__(
        self, params: Decoder, policy: Policy, sizes: Sizes, *, memory: int, folder: str | Path | None
    ) -> None:
        """Makes an empty store.

        Args:
            params: the model.
            policy: that compresses the prefixes.
            sizes: of the engine, which fix the shape of a row.
            memory: the most bytes on the host. A larger cache is not stored.
            folder: where caches are also kept on disk, without a bound; None for memory alone.

        Raises:
            ValueError: for a policy that must see the question, and for what is no path of a folder.
        """
        check_prefixes(policy)
        if folder is not None:
            check_path("prefix_folder", folder)
            check_folder(Path(folder).expanduser(), overwrite=True)
        self.hits = self.misses = self.nbytes = 0
        self._params, self._memory = params, memory
        self._folder = None if folder is None else Path(folder).expanduser()
        self._origin = hashlib.sha256(f"{fingerprint(params)} {policy!r} {sizes}".encode()).digest()
        self._caches: OrderedDict[str, KVCache] = OrderedDict()
        self._lock = threading.Lock()

    def key(self, tokens: Int[np.ndarray, "N"]) -> str:
        """The name of a prefix: a hash of the model, the policy, the engine's sizes and the tokens."""
        return hashlib.sha256(self._origin + tokens.astype("<i4").tobytes()).hexdigest()

    def get(self, key: str) -> KVCache | None:
        """The cache of a prefix, which becomes the most recently used one; None if it is not there."""
        with self._lock:
            if key in self._caches:
                self._caches.move_to_end(key)
                self.hits += 1
                return self._caches[key]
        cache = self._from_disk(key)
        with self._lock:
            self.hits += cache is not None
            self.misses += cache is None
        if cache is not None:
            self._keep(key, cache)
        return cache

    def put(self, key: str, cache: KVCache) -> None:
        """Stores a cache of NumPy arrays. Raises OSError if it cannot be written to disk."""
        if self._folder is not None:
            save_cache(self._folder / key, cache, self._params, overwrite=True)
        self._keep(key, cache)

    def _keep(self, key: str, cache: KVCache) -> None:
        size = _nbytes(cache)
        with self._lock:
            if size > self._memory or key in self._caches:
                return
            while self.nbytes + size > self._memory:
                _, old = self._caches.popitem(last=False)
                self.nbytes -= _nbytes(old)
            self._caches[key] = cache
            self.nbytes += size

    def _from_disk(self, key: str) -> KVCache | None:
        """The cache that an engine wrote earlier. A damaged one is removed, and read again."""
        if self._folder is None or not (self._folder / key).is_dir():
            return None
        try:
            return restore_on_host(self._folder / key, self._params)
        except ValueError:
            shutil.rmtree(self._folder / key, ignore_errors=True)
            return None


def _nbytes(cache: KVCache) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache))

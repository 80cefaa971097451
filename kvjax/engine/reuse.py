"""Conversations and stored prefixes, which requests continue in place of reading their prompt from the beginning.

A conversation is the cache of a finished answer. A request continues it if its prompt begins with the tokens that the
cache has seen: the prompt and the answer of the earlier request, but for the last token, which has no entry yet. It
reads the others as a later turn, as `generate(cache=...)` does, and what was evicted stays evicted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from kvjax.checks import shown
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.runtime.memory import tree_bytes

from .memory import bytes_of, bytes_of_row_per_device, caches_on_devices, planned_row
from .plans import Plans
from .stats import StoreCounts
from .stored import CacheStore, Stored

FEWEST = 2  # new tokens: a later turn reads the last token of the answer and at least one more
Found = tuple[CacheStore, str, Stored]


class Wanted(NamedTuple):
    """The facts of a request that decide how it is read.

    Attributes:
        prompt: int32 token ids.
        prefix: those before it, or None.
        limit: the most tokens of the answer.
        continues: whether the request may continue a conversation.
    """

    prompt: Int[np.ndarray, "N"]
    prefix: Int[np.ndarray, "M"] | None
    limit: int
    continues: bool

    @property
    def tokens(self) -> Int[np.ndarray, "M+N"]:
        """All tokens of the request."""
        return self.prompt if self.prefix is None else np.concatenate([self.prefix, self.prompt])


def check_prefixes(policy: Policy) -> None:
    """Raises ValueError for a policy that compresses a prompt by its end, where the question would be."""
    if policy.asks_the_end:
        part = policy.score if policy.score.needs.asks_the_end else policy.storage
        raise ValueError(
            f"{type(part).__name__} looks at the last queries of a prompt, so the question must be a part of the "
            "prompt: expected a policy whose compression does not look at the question, such as kvzip, kvcompose, h2o, "
            "keydiff, knorm, streaming_llm or full, or an engine without prefix_memory"
        )


def _bytes_for(what: str, memory: Any, least: int) -> int:
    """The bytes of a store. Raises ValueError for less than one of its caches takes."""
    name = f"{what}_memory"
    if (count := bytes_of(memory, name)) < least:
        raise ValueError(f"{name}={shown(memory)}: expected at least {least:,} bytes, which one {what} takes, or None")
    return count


class Reuse:
    """The stores of an engine.

    Attributes:
        prefixes: None if requests have no prefix.
        conversations: None if no conversation is continued.
    """

    def __init__(
        self,
        params: Decoder,
        plans: Plans,
        *,
        prefix_memory: Any = None,
        prefix_folder: str | Path | None = None,
        conversation_memory: Any = None,
        conversation_device_memory: Any = None,
    ) -> None:
        """Empty stores. `Engine` documents the arguments.

        Raises:
            ValueError: for an argument that is not accepted.
        """
        self._plans = plans
        row = tree_bytes(planned_row(params.config, plans))  # with all of its arrays
        self.prefixes: CacheStore | None = None
        self.conversations: CacheStore | None = None
        if prefix_memory is not None:
            check_prefixes(plans.policy)
            # Of prefixes on disk, the memory may hold none.
            memory = _bytes_for("prefix", prefix_memory, row if prefix_folder is None else 0)
            self.prefixes = CacheStore(params, plans.policy, plans.sizes, memory=memory, folder=prefix_folder)
        elif prefix_folder is not None:
            raise ValueError(f"prefix_folder={shown(prefix_folder)} without prefix_memory: expected both")
        if prefix_folder is not None and plans.on_hosts:
            raise ValueError("prefix_folder on the devices of several processes: expected prefix_memory alone")
        if conversation_memory is not None:
            memory = _bytes_for("conversation", conversation_memory, row)
            on_devices = caches_on_devices(params.config, plans)
            if conversation_device_memory is not None and not on_devices:
                least = bytes_of_row_per_device(params.config, plans)
                raise ValueError(
                    f"conversation_device_memory={shown(conversation_device_memory)}: expected at least {least:,} "
                    "bytes, which one conversation takes on each device, or None"
                )
            self.conversations = CacheStore(params, plans.policy, plans.sizes, memory=memory, on_devices=on_devices)
        elif conversation_device_memory is not None:
            raise ValueError(
                f"conversation_device_memory={shown(conversation_device_memory)} without conversation_memory: expected "
                "both"
            )
        # A cache that rotates keys by their place needs no position that the model has not seen.
        config, sizes = params.config, plans.sizes
        trained = None if plans.policy.positions == "in_cache" else config.max_positions
        self._furthest = None if trained is None else max(trained, sizes.max_prompt + sizes.max_new_tokens)

    def check(self, wanted: Wanted, row: KVCache) -> None:
        """Raises TooLongError for a request that seems to continue nothing and cannot be read from its beginning.

        Args:
            row: shapes of a row's cache.
        """
        if not self.finds(wanted):
            prefix = None if wanted.prefix is None else wanted.prefix.size
            self._plans.check(wanted.prompt.size, prefix, wanted.limit, row)

    def finds(self, wanted: Wanted) -> bool:
        """Returns whether a request seems to continue a cache: it is there, and may have room."""
        return self._found(wanted) is not None

    def take(self, wanted: Wanted) -> Stored | None:
        """The cache that a request continues, and None if it continues none. On several hosts, all call it."""
        if not wanted.continues:
            return None
        found = self._found(wanted)
        if found is not None:
            found[2].settle()  # now it is known what has room
            found = self._found(wanted)
        if found is None:
            if self.conversations is not None:
                self.conversations.misses += 1
            return None
        store, key, stored = found
        store.use(key)
        store.hits += 1
        return stored

    def keeps(self, tokens: Int[np.ndarray, "N"]) -> bool:
        """Returns whether a cache that has seen these tokens is to be kept. One that is there already is used."""
        return self.conversations is not None and not self.conversations.use(self.conversations.key(tokens))

    def keep(self, tokens: Int[np.ndarray, "N"], stored: Stored) -> Stored | None:
        """Keeps the cache of a conversation that has seen these tokens. Returns the one that is to go to the host."""
        assert self.conversations is not None
        return self.conversations.put(self.conversations.key(tokens), stored)

    @property
    def counts(self) -> dict[str, StoreCounts]:
        """The counts by the name of the store."""
        stores = {"prefixes": self.prefixes, "conversations": self.conversations}
        return {name: StoreCounts() if store is None else store.counts for name, store in stores.items()}

    def _found(self, wanted: Wanted) -> Found | None:
        """The longest cache that a request continues, with its store and key; None if there is none, or no room."""
        if self.conversations is None or not wanted.continues:
            return None
        tokens, found = wanted.tokens, list[Found]()
        for store in (self.prefixes, self.conversations):
            if store is not None and (longest := store.longest(tokens, tokens.size - FEWEST)) is not None:
                found.append((store, *longest))
        best = max(found, key=lambda one: one[2].length, default=None)
        return best if best is not None and self._fits(best[2], tokens.size, wanted.limit) else None

    def _fits(self, stored: Stored, length: int, limit: int) -> bool:
        """Returns whether a request of this length may continue a cache, and its answer has room."""
        new, furthest = length - stored.length, self._furthest
        within = furthest is None or length + limit <= furthest
        return within and new <= self._plans.most_after and stored.takes(new + limit)

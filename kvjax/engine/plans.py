"""The static choices of all reads of an engine: shapes that follow from its sizes and a prompt's class alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.attend import ReadPlan
from kvjax.cache import statics
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import DATA, place, rows_sharding
from kvjax.models import DecoderConfig
from kvjax.plan import on_mesh
from kvjax.policy import Policy, Texts
from kvjax.reading.prompt import Plan
from kvjax.reading.room import Ending, ending, plan_read

from .errors import TooLongError
from .sizes import Sizes

Arrays = TypeVar("Arrays")


@dataclass(frozen=True)
class Plans:
    """The static choices of all reads of an engine.

    Attributes:
        policy: what caches retain.
        sizes: of the engine.
        empty: the shapes of a cache of one row before its prompt, without slots.
        end: what happens at the end of a prompt.
        mesh: the devices; None for one.
        texts: token ids that the policy's score replays.
        keeps: whether the caches of finished answers are kept, so that later requests continue them.
        device_memory: the most bytes of those that stay on each device.
    """

    policy: Policy
    sizes: Sizes
    empty: KVCache
    end: Ending
    mesh: Mesh | None
    texts: Texts
    keeps: bool = False
    device_memory: int = 0

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        policy: Policy,
        sizes: Sizes,
        dtype: jnp.dtype,
        mesh: Mesh | None,
        texts: Texts,
        *,
        keeps: bool = False,
        device_memory: int = 0,
    ) -> Plans:
        """The choices for a model, of which only the shapes matter."""
        empty = jax.eval_shape(lambda: KVCache.empty(config, policy, jnp.ones(1, jnp.int32), sizes.prompt, dtype))
        return cls(policy, sizes, empty, ending(empty, "auto"), mesh, texts, keeps, device_memory)

    @property
    def batch(self) -> int:
        """The number of rows in which a prompt is read: on a mesh, one for each part of the batch."""
        return 1 if self.mesh is None else self.mesh.shape[DATA]

    @property
    def model(self) -> int:
        """The number of devices that divide a row."""
        return 1 if self.mesh is None else self.mesh.size // self.batch

    @property
    def on_hosts(self) -> bool:
        """Returns whether the devices belong to several processes."""
        return self.mesh is not None and self.mesh.is_multi_process

    def put_rows(self, x: Any) -> Any:
        """An array of the host with axes [B, ...], as programs take it. One process hands it over as it is."""
        return place(x, rows_sharding(self.mesh)) if self.mesh is not None and self.on_hosts else x

    def everywhere(self, some: Arrays) -> Arrays:
        """The arrays of requests, with axes [B, ...], for each part of the batch."""
        return jax.tree.map(lambda x: self.put_rows(np.concatenate([x] * self.batch)), some)

    def put_row(self, cache: KVCache) -> KVCache:
        """A cache of the host with one row, as programs take it: once for each part of the batch."""
        cache = jax.tree.map(lambda x: np.repeat(x, self.batch, axis=0), cache)
        return jax.tree.map(place, cache, cache.shardings) if self.on_hosts else cache

    def shapes_of(self, x: Any) -> jax.ShapeDtypeStruct:
        """The shape of an array of the host with axes [B, ...], where the rows lie."""
        rows = None if self.mesh is None else rows_sharding(self.mesh)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)

    def placed(self, shapes: Any) -> Any:
        """The same shapes of what a program returns, where it lies."""
        return shapes if self.mesh is None else on_mesh(shapes, self.mesh)

    def of_class(self, count: int, size: int) -> Plan:
        """The choices for a number of prompts of a class.

        The last chunk of one prompt leaves the slots of a resident row. Several prompts get the slots that the longest
        of them need, which become those of a row when they are admitted; where a budget is allocated, or a storage
        settles a prompt, the row has its shape from the beginning.
        """
        end, sizes, nothing = self.end, self.sizes, (0,) * len(self.empty.entries)
        chunk = sizes.chunk if size > sizes.chunk else None
        before = size - sizes.chunk if chunk else 0
        between = plan_read(self.empty, nothing, new=before, room=0, compress=False, final=False)
        new, room = size if end.allocate else sizes.prompt, sizes.room
        if count > 1 and not end.allocate and self.policy.storage.newest is None:
            new, room = max(sizes.parts), 0
        return Plan(end, chunk, between, new, room, nothing, begins=True, longest=self.longest)

    @property
    def most_after(self) -> int:
        """The most tokens that are read after a stored cache. A pool reads them in one piece."""
        return self.sizes.max_prompt if self.keeps and not self.end.allocate else self.sizes.chunk

    def between(self, size: int, row: KVCache) -> ReadPlan:
        """Returns the choices for the chunks before the last one of a class of tokens that follow a stored cache.

        Args:
            row: shapes of a row's cache, all of whose slots may be occupied.
        """
        before = size - self.sizes.chunk
        return plan_read(row, row.entries.bounds, new=before, room=0, compress=False, final=True)

    def after(self, size: int, row: KVCache) -> ReadPlan:
        """Returns the choices for the last chunk of tokens that follow a stored cache.

        Args:
            size: of the chunk.
            row: shapes of a row's cache, which is what the chunk leaves.
        """
        end = ending(row, "auto")
        if not row.entries.preallocates:
            kept = row.kept if self.policy.budget.pace is None else row.entries.bounds
            return ReadPlan(row.entries.bounds, kept if end.compress else (None,) * len(kept), end.final)
        held = (self.longest + self.sizes.room,) * len(row.entries)  # more than any segment holds
        return plan_read(row, held, new=size, room=0, compress=end.compress, final=end.final)

    def check(self, prompt: int, prefix: int | None, limit: int, row: KVCache) -> None:
        """Raises TooLongError for a request that cannot be read from its beginning.

        Args:
            prompt: the number of its tokens.
            prefix: the number of tokens before it; None if it has no prefix.
            limit: the most tokens of the answer.
            row: shapes of a row's cache.
        """
        if prefix is None:
            check_length("prompt", prompt, "max_prompt", self.sizes.max_prompt)
        else:
            check_length("prompt after a prefix", prompt, "chunk", self.sizes.chunk)
            self._check_after(prefix, prompt, limit, row)

    def _check_after(self, prefix: int, question: int, limit: int, row: KVCache) -> None:
        """Raises TooLongError if a layer that grows has no room for a question and its answer after a prefix."""
        lengths: Any = np.array([prefix])
        layers, needed = len(row.entries), question + limit
        if row.entries.preallocates:
            free = self.sizes.room if statics(row.entries)["growing"] else needed
        else:
            held = [min(prefix, int(self.policy.capacity(i, lengths, layers)[0])) for i in range(layers)]
            whole = zip(row.grows, row.entries.bounds, held, row.windows, strict=True)
            free = min(
                slots - n if grows else self.policy.longest(slots) - prefix
                for grows, slots, n, window in whole
                if slots != window
            )
        if needed > free:
            raise TooLongError(
                f"a question of {question} tokens and an answer of {limit} do not fit after a prefix of {prefix}: "
                f"expected at most {max(free, 0)} together, or an engine with a larger max_new_tokens"
            )

    @property
    def longest(self) -> int:
        """The most entries that any head has once a prompt has been read."""
        layers, size = len(self.empty.kept), self.sizes.prompt
        most = max([size, *(self.policy.slots(i, size, layers) or 0 for i in range(layers))])
        return most + self.policy.learned_count

    @property
    def begin(self) -> dict[str, Any]:
        """The static arguments of `begun` that do not depend on the model."""
        return {"policy": self.policy, "size": self.sizes.prompt, "dtype": self.empty.dtype, "mesh": self.mesh}


def check_length(what: str, length: int, name: str, most: int) -> None:
    """Raises TooLongError for a text with more tokens than the engine's setting `name` allows."""
    if length > most:
        raise TooLongError(f"the {what} has {length} tokens: expected at most {name}={most}")

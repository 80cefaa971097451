"""The cache of a batch: its entries, what each row has seen, and the policy that made it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from kvjax import policies
from kvjax.cache import Entries, FromKeys, Layers, Slots, bucket
from kvjax.checks import bytes_text, check_integers, check_params, check_type, counted, index_of, shown
from kvjax.mesh.sharding import (
    MODEL,
    check_allocated,
    check_batch,
    fetch,
    fit_mesh,
    heads_sharding,
    mesh_of,
    place,
    rows_sharding,
)
from kvjax.models import Decoder, DecoderConfig, RecurrentState
from kvjax.policy import LayerShape, Policy
from kvjax.policy.suits import check_attached, check_is_policy, check_suits
from kvjax.runtime.memory import tree_bytes
from kvjax.runtime.modes import own_modes

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The memory of a model for a batch of texts: an immutable pytree. Extending it makes another one.

    Attributes:
        entries: keys, values, positions and the policy's state. `Layers` of slots; `Segments` of one pool once a budget
            has been allocated across layers and heads.
        length: the number of tokens that each row has seen, retained or not, and of its learned tokens: the position of
            the next one. int32.
        recurrent: the states of the recurrent layers before each layer, in their order; empty tuples where there are
            none. No policy touches them.
        rope: RoPE's frequencies of each row, float32, where they depend on its length (dynamic, longrope). The length
            of the prompt fixes them. None where they do not depend on it.
        pending: each row's last sampled token, int32. It has no entry yet and is read first in the next call; -1 if
            there is none.
        policy: the policy that made this cache and may extend it.
        kept: the number of entries that each layer retains at most when it is compressed; None where it retains
            everything. Until a budget is allocated: the largest prompt that the cache was made for.
        windows: each layer's sliding window, the most slots it ever needs.
        filled: whether the prompt has been read to its end and compressed.
        mesh: the devices that hold the cache, rows over `data` and kv heads over `model`; None for one device.
    """

    entries: Entries
    length: Int[Array, "B"]
    recurrent: tuple[tuple[RecurrentState, ...], ...]
    rope: Float[Array, "B C/2"] | None
    pending: Int[Array, "B"]
    policy: Policy = field(metadata=STATIC)
    kept: tuple[int | None, ...] = field(metadata=STATIC)
    windows: tuple[int | None, ...] = field(metadata=STATIC)
    filled: bool = field(default=False, metadata=STATIC)
    mesh: Mesh | None = field(default=None, metadata=STATIC)

    @classmethod
    def empty(
        cls,
        config: DecoderConfig,
        policy: Policy,
        prompt_lengths: Int[Array, "B"],
        prompt_size: int,
        dtype: Any,
        mesh: Mesh | None = None,
    ) -> KVCache:
        """A cache without entries; `empty_cache` makes one for given parameters.

        Args:
            prompt_lengths: of the prompts to come. Budgets that are a share of the prompt depend on them, and RoPE
                where its frequencies do.
            prompt_size: an upper bound of the lengths. It fixes the number of slots that follows from a budget.
            dtype: of keys and values.
            mesh: the parameters' mesh.

        Raises:
            ValueError: if the batch does not divide over the mesh's `data`, or if the mesh or the policy does not fit
                the model.
        """
        batch, layers = prompt_lengths.shape[0], config.num_layers
        if mesh is not None:
            mesh = fit_mesh(mesh, config)
        check_batch(batch, mesh)
        check_suits(policy, config, 1 if mesh is None else mesh.shape[MODEL])
        cache = cls(
            **_unfilled(prompt_lengths, config=config, policy=policy, dtype=jnp.dtype(dtype)),
            policy=policy,
            kept=_kept(policy, prompt_size, layers),
            windows=config.windows,
            mesh=mesh,
        )
        return cache if mesh is None else jax.tree.map(place, cache, cache.shardings)

    @property
    def batch_size(self) -> int:
        """The number of rows, B."""
        return self.length.shape[0]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of keys and values in computations."""
        return self.entries.stored[0].dtype

    @property
    def nbytes(self) -> int:
        """The bytes of keys, values, positions, the policy's state and the states of recurrent layers.

        It is exact for a planned cache too.
        """
        return tree_bytes((self.entries, self.recurrent))

    @property
    def grows(self) -> tuple[bool, ...]:
        """Returns whether decoding adds to each layer for as long as it goes on."""
        return tuple(not evicts for evicts in self.policy.limits(len(self.entries)).evicts)

    def rooms(self, tokens: int) -> tuple[int, ...]:
        """Returns the slots that each layer needs for that many more tokens, beyond those that it occupies."""
        if self.entries.preallocates:  # heads of a layer may differ, and those that grow are known to the pool
            return (tokens,) * len(self.entries)
        return tuple(tokens if grows else self.policy.rise(tokens) for grows in self.grows)

    @property
    def shardings(self) -> KVCache:
        """The place of each array, in the form of the cache; only for a cache on a mesh."""
        assert self.mesh is not None
        heads, rows = heads_sharding(self.mesh), rows_sharding(self.mesh)
        return replace(jax.tree.map(lambda _: rows, self), entries=jax.tree.map(lambda _: heads, self.entries))

    def in_place(self) -> KVCache:
        """The same cache, with its shardings stated to XLA; for use inside `jax.jit`."""
        return self if self.mesh is None else jax.lax.with_sharding_constraint(self, self.shardings)

    def put_rows(self, x: Any) -> Any:
        """An array with axes [B, ...] from the host on the devices that hold these rows; unchanged without a mesh."""
        return x if self.mesh is None else place(x, rows_sharding(self.mesh))

    def private(self) -> KVCache:
        """The same cache with copies of the small arrays that a program may hand through and a later one donates."""
        small = {name: getattr(self, name) for name in ("length", "recurrent", "rope", "pending")}
        return replace(self, entries=self.entries.private(), **jax.tree.map(jnp.array, small))

    def repeated(self, rows: int) -> KVCache:
        """A cache of one row, `rows` times."""
        cache = _repeated(self, rows)
        return cache if self.mesh is None else jax.tree.map(place, cache, cache.shardings)

    def for_prompts(self, lengths: Int[np.ndarray, "B"]) -> KVCache:
        """A cache whose prompts go on, with the budgets of prompts of these lengths, or of longer ones if it has them.

        Only for a cache that is not filled.
        """
        layers, held = len(self.entries), [layer.capacity for layer in self.entries]
        capacities = _at_least(held, self.put_rows(lengths), policy=self.policy)
        if self.mesh is not None:
            capacities = [place(x, heads_sharding(self.mesh)) for x in capacities]
        slots = _kept(self.policy, bucket(int(lengths.max())), layers)
        each = zip(self.entries, capacities, strict=True)
        return replace(
            self,
            entries=Layers(tuple(replace(layer, capacity=capacity) for layer, capacity in each)),
            kept=tuple(None if n is None else max(n, own or 0) for n, own in zip(slots, self.kept, strict=True)),
        )

    def retained(self, layer: int, head: int, row: int = 0) -> Int[np.ndarray, "_"]:
        """The positions of the entries of one kv head, ascending, int32, on the host.

        A token that was merged into another's entry has none of its own.

        Args:
            layer, head, row: count from 0, or with negative numbers from the end.

        Raises:
            ValueError: for a number that is not an integer, or beyond the cache's layers, kv heads or rows.
        """
        layer = index_of("layer", layer, len(self.entries))
        head = index_of("head", head, self.entries.heads[layer].number)
        positions = self.entries.by_head(index_of("row", row, self.batch_size))[layer][head]
        return np.sort(positions[positions >= 0])

    def retained_mask(self) -> Bool[np.ndarray, "B L H N"]:
        """Marks tokens with an entry, by row, layer, kv head and position, on the host; N is the longest row's length.

        It marks the positions that `retained` lists. H is that of the layer with the most kv heads; heads that another
        layer does not have are unmarked.
        """
        most = max(heads.number for heads in self.entries.heads)
        shape = self.batch_size, len(self.entries), most, int(fetch(self.length).max(initial=0))
        found = np.zeros(shape, bool)
        for row in range(self.batch_size):
            for layer, heads in enumerate(self.entries.by_head(row)):
                for head, positions in enumerate(heads):
                    found[row, layer, head, positions[positions >= 0]] = True
        return found

    def in_words(self) -> str:
        """Says what the longest row holds and what all rows reserve, as every command does."""
        held, seen = self._held_of_seen()
        slots = math.ceil(fmean(self.entries.mean_slots))
        return (
            f"the cache holds {held:,.0f} of {seen:,} tokens per head, with room for {slots:,}; "
            f"{bytes_text(self.nbytes)} are reserved"
        )

    def _held_of_seen(self) -> tuple[float, int]:
        """The mean number of retained entries per head, and of tokens that were seen, of the longest row."""
        seen = fetch(self.length)
        row = int(np.argmax(seen))
        return float(fetch(_held(self))[row].mean()), int(seen[row])

    def __repr__(self) -> str:
        batch, layers = self.batch_size, len(self.entries)
        counts = dict.fromkeys(heads.number for heads in self.entries.heads)
        facts = [
            policies.brief(self.policy),
            counted(batch, "row"),
            f"{layers} x {' or '.join(map(str, counts))} heads",
        ]
        if isinstance(self.length, jax.Array) and not isinstance(self.length, jax.core.Tracer):
            held, seen = self._held_of_seen()
            facts.append(f"{held:,.0f} of {seen:,} tokens{' in the longest' if batch > 1 else ''}")
        return f"KVCache({', '.join([*facts, bytes_text(self.nbytes)])})"


def _kept(policy: Policy, prompt_size: int, layers: int) -> tuple[int | None, ...]:
    """The slots that each layer keeps of prompts up to a size; all of them where an allocation comes later."""
    return tuple(prompt_size if policy.allocates else policy.slots(i, prompt_size, layers) for i in range(layers))


@partial(jax.jit, static_argnums=1)
def _repeated(cache: KVCache, rows: int) -> KVCache:
    return jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), cache)


@partial(jax.jit, static_argnames="policy")
def _at_least(held: list[Array], lengths: Int[Array, "B"], *, policy: Policy) -> list[Array]:
    """The capacities [B, H] of each layer, at least those that a policy gives to prompts of these lengths."""
    return [jnp.maximum(own, policy.capacity(i, lengths, len(held))[:, None]) for i, own in enumerate(held)]


@jax.jit
def _held(cache: KVCache) -> Float[Array, "B L"]:
    """The number of retained entries of each of B rows and L layers, averaged over kv heads."""
    return cache.entries.held()


@partial(jax.jit, static_argnames=("config", "policy", "dtype"))
def _unfilled(
    prompt_lengths: Int[Array, "B"], *, config: DecoderConfig, policy: Policy, dtype: jnp.dtype
) -> dict[str, Any]:
    """The arrays of an empty cache. One program makes them in a tenth of the time that they take one by one."""
    batch, layers = prompt_lengths.shape[0], config.num_layers

    def layer(i: int) -> Slots:
        shape = LayerShape(batch, config.num_heads, *config.heads_of(i), dtype, config.hidden_size)
        stored = policy.storage.store(jnp.zeros((batch, shape.kv_heads, 0, shape.head_dim), dtype))
        capacity = policy.capacity(i, prompt_lengths, layers)
        limited = policy.limited(i)
        entries = Slots(
            keys=stored,
            values=stored,
            positions=jnp.zeros(stored.shape[:3], jnp.int32),
            capacity=jnp.broadcast_to(capacity[:, None], stored.shape[:2]),
            bias=jnp.zeros(stored.shape[:3], jnp.float32) if limited and policy.merge.effects.bias else None,
        )
        return policy.with_state(entries, shape, limited=limited)

    return {
        "entries": held_once(Layers(tuple(layer(i) for i in range(layers))), config, policy),
        "length": jnp.zeros(batch, jnp.int32),
        "recurrent": config.recurrent_states(batch, dtype),
        "rope": config.rope.row_frequencies(config.head_dim, prompt_lengths),
        "pending": jnp.full(batch, -1, jnp.int32),
    }


def held_once(layers: Layers, config: DecoderConfig, policy: Policy) -> Layers:
    """Returns layers without the values that their keys contain, unless the policy changes entries."""
    if config.latent is None or policy.changes_entries:
        return layers
    values = FromKeys(config.latent.rotated)
    return Layers(tuple(replace(layer, values=values) for layer in layers.each))


def check_cache(cache: Any) -> None:
    """Raises ValueError for what is no cache, or is planned."""
    check_type("cache", cache, KVCache)
    check_allocated(cache.length)


@own_modes()
def empty_cache(params: Decoder, policy: Policy, prompt_lengths: Int[Array, "B"]) -> KVCache:
    """An empty cache, to be extended by `kvjax.extend`.

    Args:
        params: the decoder, as `load` returns it. The cache lies on the same devices.
        policy: what the cache retains.
        prompt_lengths: the number of tokens of each row's prompt. They fix the capacities that a share of the prompt
            gives, and the number of slots.

    Raises:
        ValueError: for lengths that are not integers [B] of at least 1, a batch that does not divide over the mesh, and
            a policy that does not fit the model.
    """
    check_params(params)
    check_is_policy(policy)
    check_integers("prompt_lengths", prompt_lengths)
    lengths = fetch(prompt_lengths) if isinstance(prompt_lengths, jax.Array) else np.asarray(prompt_lengths)
    if lengths.ndim != 1 or lengths.size == 0 or lengths.min() < 1:
        raise ValueError(f"prompt_lengths={shown(prompt_lengths)}: expected integers [B], each at least 1")
    check_attached(policy, params)
    prompts, size = jnp.asarray(lengths, jnp.int32), int(lengths.max())
    return KVCache.empty(params.config, policy, prompts, size, params.embed.dtype, mesh_of(params))

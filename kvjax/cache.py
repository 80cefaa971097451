"""The cache as a value: fixed shapes, a pytree, no behaviour of its own. What to keep is the policy's affair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax.models import DecoderConfig
from kvjax.overwrite import clear_slot, set_slots
from kvjax.pallas_kernels import Stored, plain, updated
from kvjax.policy import Policy
from kvjax.protocols import LayerShape, SharedBudget
from kvjax.sharding import MODEL, check_batch, fit_mesh, heads_sharding, place, rows_sharding

if TYPE_CHECKING:
    from kvjax.ragged import RaggedCache

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerCache:
    """The entries of one layer. Slot order is free: `positions` says what a slot holds.

    Attributes:
        keys: after RoPE at their original position, or before it if the policy rotates by place in the cache; as the
            policy's storage has it, an array [B, H, S, D] or a pytree whose leaves have axes [B, H, S, ...].
        values: beside the keys, likewise.
        positions: the token position in each slot, -1 if it is empty.
        capacity: how many slots a row's head may occupy before it must evict; beyond S where nothing is ever evicted.
        per_slot: policy state with axes [B, H, ..., S]: moves with its slot and is cleared with it.
        per_row: policy state with axes [B, H, ...], or [B, Hq, ...].
        bias: added to the logits of each slot, 0 for an entry of one token; None under every policy without merges that
            weigh entries.
    """

    keys: Float[Array, "B H S D"] | Any
    values: Float[Array, "B H S D"] | Any
    positions: Int[Array, "B H S"]
    capacity: Int[Array, "B H"]
    per_slot: Any = None
    per_row: Any = None
    bias: Float[Array, "B H S"] | None = None

    @property
    def slots(self) -> int:
        return self.positions.shape[-1]

    @property
    def occupancy(self) -> Int[Array, "B H"]:
        """Slots that hold a token."""
        return jnp.sum(self.positions >= 0, axis=-1)

    def plain(self) -> LayerCache:
        """The same with keys and values as arrays, which is how parts and attention see them."""
        return replace(self, keys=plain(self.keys), values=plain(self.values))

    def updated(self, shown: LayerCache, changed: LayerCache) -> LayerCache:
        """What has become of the entries in a part that made `changed` of `shown`, which is `plain()` of these.

        Held as they are here; slots whose key or value is another are stored anew, the others remain bit by bit.
        """
        return replace(
            changed,
            keys=updated(self.keys, shown.keys, changed.keys),
            values=updated(self.values, shown.values, changed.values),
        )

    def gather(self, index: Int[Array, "B H K"]) -> LayerCache:
        """The entries at `index` as a cache of K slots; -1 makes an empty slot."""

        def take(x: Array, axis: int = -1, empty: int = 0) -> Array:
            B, H, K = index.shape
            shape = [B, H] + [1] * (x.ndim - 2)
            shape[axis] = K
            at = index.reshape(shape)
            return jnp.where(at >= 0, jnp.take_along_axis(x, jnp.maximum(at, 0), axis), jnp.asarray(empty, x.dtype))

        return replace(
            self,
            keys=jax.tree.map(partial(take, axis=2), self.keys),
            values=jax.tree.map(partial(take, axis=2), self.values),
            positions=take(self.positions, empty=-1),
            per_slot=jax.tree.map(take, self.per_slot),
            bias=jax.tree.map(take, self.bias),
        )

    def append(self, other: LayerCache) -> LayerCache:
        """The slots of both, `other`'s last. State per row and capacity are this one's."""

        def join(x: Array, y: Array, axis: int = -1) -> Array:
            return jnp.concatenate([x, y], axis) if self.slots else y

        bias = self.bias
        if bias is not None:
            bias = join(bias, jnp.zeros(other.positions.shape, bias.dtype) if other.bias is None else other.bias)
        return replace(
            self,
            keys=jax.tree.map(partial(join, axis=2), self.keys, other.keys),
            values=jax.tree.map(partial(join, axis=2), self.values, other.values),
            positions=join(self.positions, other.positions),
            per_slot=jax.tree.map(join, self.per_slot, other.per_slot),
            bias=bias,
        )

    def write(
        self,
        slot: Int[Array, "B H"],
        key: Stored,
        value: Stored,
        position: Int[Array, "B H"],
    ) -> LayerCache:
        """Overwrites one slot a row and head, and clears its state. A slot beyond the last writes nothing.

        Key and value are [B, H, D], in the form in which the others are held.
        """
        b, h = jnp.arange(slot.shape[0])[:, None], jnp.arange(slot.shape[1])

        def put(x: Array, new: Array) -> Array:
            return set_slots(x, (b, h, slot), new)

        clear = partial(clear_slot, slot=slot)
        return replace(
            self,
            keys=jax.tree.map(put, self.keys, key),
            values=jax.tree.map(put, self.values, value),
            positions=put(self.positions, position),
            per_slot=jax.tree.map(clear, self.per_slot),
            bias=jax.tree.map(clear, self.bias),
        )

    def grow(self, slots: int) -> LayerCache:
        """The same entries with empty slots added up to `slots`."""
        extra = slots - self.slots

        def widen(x: Array, axis: int = -1, empty: int = 0) -> Array:
            widths = [(0, 0)] * x.ndim
            widths[axis] = (0, extra)
            return jnp.pad(x, widths, constant_values=empty)

        if extra <= 0:
            return self
        return replace(
            self,
            keys=jax.tree.map(partial(widen, axis=2), self.keys),
            values=jax.tree.map(partial(widen, axis=2), self.values),
            positions=widen(self.positions, empty=-1),
            per_slot=jax.tree.map(widen, self.per_slot),
            bias=jax.tree.map(widen, self.bias),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """What a model remembers of a batch of texts. A value: extending it makes another one.

    Attributes:
        layers: one LayerCache a layer; layers may differ in their number of slots. None, (), once there is a pool.
        length: tokens each row has seen, kept or not. The next one's position.
        rope: RoPE's frequencies of each row, where they depend on its length (dynamic, longrope): fixed by the prompt's
            length when it is first read, and the same for all that follows. None where they do not.
        pending: each row's last sampled token, which has no entry yet and goes first in the next call; -1 if none.
        pool: the entries of all layers, where the policy shares its budget out among them and has done so.
        policy: the policy that made this cache and may extend it.
        kept: entries that each layer keeps at most when it is compressed, or, of a shared budget, its mean kv head;
            None where it keeps everything.
        windows: each layer's sliding window, beyond which it never needs slots.
        filled: whether the prompt has been read to its end and compressed.
        mesh: the devices that it is spread over, its rows over `data` and its heads over `model`; None for one.
    """

    layers: tuple[LayerCache, ...]
    length: Int[Array, "B"]
    rope: Float[Array, "B R/2"] | None
    pending: Int[Array, "B"]
    pool: RaggedCache | None
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
        """A cache without slots for prompts of the given lengths, of which none is longer than the static size.

        The lengths matter to budgets that are a share of the prompt, and to RoPE where its frequencies depend on them;
        the size fixes the slots that follow from budgets. With a mesh, that of the parameters, the cache is spread over
        it. Raises ValueError if the batch does not divide over the mesh's `data`, or the mesh or the policy's storage
        does not fit the model.
        """
        batch = prompt_lengths.shape[0]
        if mesh is not None:
            mesh = fit_mesh(mesh, config)
        check_batch(batch, mesh)
        if isinstance(policy.budget, SharedBudget):
            policy.budget.check(config.num_layers, config.num_kv_heads)
            check_groups(policy.budget, config.num_kv_heads, 1 if mesh is None else mesh.shape[MODEL])
        shape = LayerShape(batch, config.num_heads, config.num_kv_heads, config.head_dim, jnp.dtype(dtype))
        layers = []
        for layer in range(config.num_layers):
            entries = policy.storage.store(jnp.zeros((batch, shape.kv_heads, 0, shape.head_dim), dtype))
            capacity = policy.capacity(layer, prompt_lengths, config.num_layers)
            per_slot, per_row = policy.init_state(layer, shape)
            biased = policy.merge.biases and policy.limited(layer)
            layers.append(
                LayerCache(
                    keys=entries,
                    values=entries,
                    positions=jnp.zeros(entries.shape[:3], jnp.int32),
                    capacity=jnp.broadcast_to(capacity[:, None], entries.shape[:2]),
                    per_slot=per_slot,
                    per_row=per_row,
                    bias=jnp.zeros(entries.shape[:3], jnp.float32) if biased else None,
                )
            )
        cache = cls(
            tuple(layers),
            length=jnp.zeros(batch, jnp.int32),
            rope=config.rope.row_frequencies(config.head_dim, prompt_lengths),
            pending=jnp.full(batch, -1, jnp.int32),
            pool=None,
            policy=policy,
            kept=tuple(policy.slots(layer, prompt_size, config.num_layers) for layer in range(config.num_layers)),
            windows=config.windows,
            mesh=mesh,
        )
        return cache if mesh is None else jax.tree.map(place, cache, cache.shardings)

    @property
    def batch_size(self) -> int:
        return self.length.shape[0]

    @property
    def dtype(self) -> jnp.dtype:
        """Of keys and values as they are computed with."""
        return (self.layers[0] if self.pool is None else self.pool).keys.dtype

    @property
    def entries(self) -> tuple[LayerCache, ...] | RaggedCache:
        """The layers, or the pool: what a decoder's layers hand on to each other."""
        return self.layers if self.pool is None else self.pool

    def with_entries(self, entries: tuple[LayerCache, ...] | RaggedCache) -> KVCache:
        return replace(self, layers=entries) if isinstance(entries, tuple) else replace(self, pool=entries)

    @property
    def head_dim(self) -> int:
        return (self.layers[0] if self.pool is None else self.pool).keys.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes held: keys, values, positions and every policy's state. Also of a cache that is only planned."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.entries))

    @property
    def shardings(self) -> KVCache:
        """Where each array lies, in the cache's own form; only for a cache on a mesh."""
        assert self.mesh is not None
        heads, rows = heads_sharding(self.mesh), rows_sharding(self.mesh)
        others = jax.tree.map(lambda _: rows, replace(self, layers=(), pool=None))
        layers, pool = jax.tree.map(lambda _: heads, (self.layers, self.pool))
        return replace(others, layers=layers, pool=pool)

    def in_place(self) -> KVCache:
        """The same cache, of which XLA is told inside `jax.jit` where it lies."""
        return self if self.mesh is None else jax.lax.with_sharding_constraint(self, self.shardings)

    def put_rows(self, x: Any) -> Any:
        """An array with axes [B, ...] from the host, on the devices that hold these rows; as it is without a mesh."""
        return x if self.mesh is None else place(x, rows_sharding(self.mesh))

    def map_layers(self, change: Callable[[LayerCache], LayerCache]) -> KVCache:
        return replace(self, layers=tuple(change(layer) for layer in self.layers))


def check_groups(budget: SharedBudget, kv_heads: int, devices: int) -> None:
    """Raises ValueError unless kv heads form groups of equal size, each whole on one of the devices."""
    groups = budget.groups
    if groups is None:
        return
    if kv_heads % groups:
        raise ValueError(f"groups={groups} of {kv_heads} kv heads; accepted is a divisor of {kv_heads}")
    if groups % devices:
        raise ValueError(
            f"{type(budget).__name__} with groups={groups} on a mesh that spreads kv heads over {devices} devices, "
            f"which would cut a group; accepted are multiples of {devices}, with which one device keeps the same"
        )

"""The one verb: extending a cache by tokens. Reading a prompt, decoding and the next turn of a dialogue all do that."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from kvjax.attend import Reading, ReadPlan, Stepping, in_array, pays, positions_behind
from kvjax.checks import check_integers, check_params, check_type, shown
from kvjax.kv_cache import KVCache, check_attached
from kvjax.mesh.sharding import logical_sharding, mesh_of, rows_sharding
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.reading.allocate import allocated
from kvjax.reading.each_layer import Call, through_layers
from kvjax.reading.replays import check_one_call, replayed
from kvjax.reading.room import Compress, check_reading, check_room, ending, occupied_slots, plan_read, with_room
from kvjax.runtime.modes import own_modes
from kvjax.runtime.programs import jit


@own_modes()
def extend(
    params: Decoder,
    cache: KVCache,
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"] | None = None,
    policy: Policy | None = None,
    *,
    compress: Compress = "auto",
) -> tuple[Float[Array, "B V"], KVCache]:
    """Extends a cache by up to N tokens per row. It is pure: it works in `jax.jit` and leaves the given cache as it is.

    One token into a filled cache is a decode step: make room, write, attend, observe. Several tokens attend to the
    cached entries and causally to themselves, and then the cache is compressed to its budget.

    Args:
        params: the decoder, an nnx module as `load` returns it.
        cache: from `empty_cache`, `prefill`, `generate` or an earlier call.
        tokens: right-aligned: the tokens of row b are the last `lengths[b]` of its N. int32.
        lengths: the number of tokens of each row, 0 .. N; a row of length 0 stays as it is. All N by default.
        policy: a check; it must be the policy that made the cache.
        compress: "auto" compresses a cache that is being filled, or whose policy evicts while decoding. "end" always
            compresses. "never" appends, and more of the prompt may follow; "chunk" does so too, but compresses.

    Returns:
        Float32 logits after each row's last token (meaningless for a row of length 0), and the new cache.

    Raises:
        ValueError: for another policy or mesh, tokens or lengths of a wrong shape, lengths beyond the tokens, ids
            outside the vocabulary, or a decode step into a cache without room. Ids that are on a device are not
            checked, since that would wait for them. Under `jax.jit` the caller provides the room: see `with_room`.
    """
    check_params(params)
    check_type("cache", cache, KVCache)
    check_policy(cache, policy)
    check_mesh(cache, params)
    check_attached(cache.policy, params)
    check_ids(tokens, params.config.vocab_size)
    tokens = jnp.asarray(tokens).astype(jnp.int32)
    if tokens.ndim != 2 or tokens.shape[0] != cache.batch_size or tokens.shape[1] < 1:
        raise ValueError(f"tokens have shape {tokens.shape}: expected [{cache.batch_size}, N] with N >= 1")
    if lengths is not None:
        check_integers("lengths", lengths)
    new = tokens.shape[1]
    check_reading(new, compress)
    lengths = jnp.full(tokens.shape[0], new) if lengths is None else jnp.asarray(lengths).astype(jnp.int32)
    concrete = not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((cache, tokens, lengths)))
    if lengths.shape != cache.length.shape or (concrete and not (0 <= int(lengths.min()) <= int(lengths.max()) <= new)):
        raise ValueError(f"lengths={lengths} of {new} columns: expected {cache.batch_size} integers in 0 .. {new}")
    if concrete:
        tokens, lengths = map(cache.put_rows, (tokens, lengths))
    if new == 1 and cache.filled and compress == "auto":
        if concrete:
            check_room(cache)
        return jitted_step(params, cache, tokens[:, 0], lengths > 0)
    end = ending(cache, compress)
    occupied = occupied_slots(cache) if concrete else cache.entries.bounds
    begins = not any(occupied)
    if end.allocate:
        check_one_call(cache.policy, begins)
    if concrete and cache.entries.preallocates:
        cache = with_room(cache, new)
    plan = plan_read(cache, occupied, new=new, room=0, compress=end.compress, final=end.final)
    logits, cache = jitted_read(params, cache, tokens, lengths, plan=plan)
    if end.allocate:
        cache = allocated(params, replayed(params, cache, tokens, lengths, None), 0, begins)
    return logits, cache


def read(
    params: Decoder, cache: KVCache, tokens: Int[Array, "B N"], lengths: Int[Array, "B"], *, plan: ReadPlan
) -> tuple[Float[Array, "B V"], KVCache]:
    """`extend` by several tokens, with every static choice made."""
    next_position = cache.length + lengths
    positions = positions_behind(cache.length, lengths, tokens.shape[1])
    rows = {"positions": positions, "lengths": lengths, "next_position": next_position, "rope": cache.rope}
    call = Call(Reading(cache.policy, cache.policy.limits(len(cache.entries)), plan), cache.mesh)
    hidden, entries = through_layers(params, tokens, cache.entries, call, **rows)
    cache = replace(cache, entries=entries, length=next_position, filled=cache.filled or plan.final)
    return _by_row(params.logits(hidden[:, -1]), cache), cache.in_place()


def step(
    params: Decoder, cache: KVCache, tokens: Int[Array, "B"], incoming: Bool[Array, "B"]
) -> tuple[Float[Array, "B V"], KVCache]:
    """`extend` by one token in the rows where one is incoming; the others stay as they are."""
    rows = {"positions": in_array(cache.length), "incoming": in_array(incoming), "rope": cache.rope}
    stepping = Stepping(cache.policy, cache.policy.limits(len(cache.entries)))
    call = Call(stepping, cache.mesh, doubled=pays(cache.batch_size, cache.mesh))
    hidden, entries = through_layers(params, tokens[:, None], cache.entries, call, **rows)
    cache = replace(cache, entries=entries, length=cache.length + incoming)
    return _by_row(params.logits(hidden[:, 0]), cache), cache.in_place()


jitted_read = jit(read, static_argnames="plan")
jitted_step = jit(step)


def _by_row(logits: Float[Array, "B V"], cache: KVCache) -> Float[Array, "B V"]:
    """The logits with whole rows on each device that has a part of the batch, as samplers need them."""
    if cache.mesh is None:
        return logits
    # The logits are gathered after the product: if whole rows are requested of it, XLA gathers the unembedding.
    cut = logical_sharding(cache.mesh, ("batch", "vocab"), logits.shape)
    logits = jax.lax.with_sharding_constraint(logits, cut)
    return jax.lax.with_sharding_constraint(logits, rows_sharding(cache.mesh))


def check_ids(tokens: ArrayLike, vocab_size: int) -> None:
    """Raises ValueError for ids that are not integers in the vocabulary, if they are on the host."""
    if isinstance(tokens, jax.Array):
        return
    check_integers("tokens", tokens)
    ids = np.asarray(tokens)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"tokens={shown(tokens)}: expected integers in 0 .. {vocab_size - 1}")


def check_policy(cache: KVCache, policy: Policy | None) -> None:
    """Raises ValueError unless `policy` is None or the one that made the cache."""
    if policy is not None and policy != cache.policy:
        raise ValueError(f"this cache was made by {cache.policy} and cannot be extended with {shown(policy)}")


def check_mesh(cache: KVCache, params: Decoder) -> None:
    """Raises ValueError unless cache and parameters are on the same mesh. Under `jax.jit` meshes are not visible."""
    traced = isinstance(jax.tree.leaves(params)[0], jax.core.Tracer)
    if not traced and cache.mesh != mesh_of(params):
        raise ValueError(
            f"the cache lies on {cache.mesh or 'one device'}, the parameters on {mesh_of(params) or 'one device'}: "
            "expected the same for both"
        )

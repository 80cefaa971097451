"""The one verb: extending a cache by tokens. Reading a prompt, decoding and the next turn of a dialogue all do that."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from kvjax.checks import check_integers, check_params, cut, shown
from kvjax.kv_cache import KVCache, check_cache
from kvjax.mesh.sharding import mesh_of
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.policy.suits import check_attached, check_is_policy
from kvjax.reading.layers import jitted_step
from kvjax.reading.prompt import Batch, read_prompt
from kvjax.reading.room import Compress, check_reading, check_room, free_room
from kvjax.runtime.modes import own_modes


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
    cached entries and causally to themselves, and then the cache is compressed to its budget. A decode step waits for
    the device only if a layer can run out of slots, for one transfer.

    Args:
        params: the decoder, an nnx module as `load` returns it.
        cache: from `empty_cache`, `prefill`, `generate` or an earlier call.
        tokens: right-aligned: the tokens of row b are the last `lengths[b]` of its N. int32. After `generate`, the
            first token of a row is `cache.pending[b]`, which has no entry yet. None is pending in a row that was
            extended.
        lengths: the number of tokens of each row, 0 .. N; a row of length 0 stays as it is. All N by default.
        policy: a check; it must be the policy that made the cache.
        compress: "auto" compresses a cache that is being filled, or whose policy evicts while decoding. "end" always
            compresses. "never" appends, and more of the prompt may follow; "chunk" does so too, but compresses.

    Returns:
        Float32 logits after each row's last token (meaningless for a row of length 0), and the new cache.

    Raises:
        ValueError: for another policy, model or mesh, tokens or lengths of a wrong shape, lengths beyond the tokens,
            ids outside the vocabulary, or a decode step into a cache without room. Ids and lengths that are on a device
            are not checked, since that would wait for them. The logits of a row are NaN if its length is not in 0 .. N.
            Under `jax.jit` the caller provides the room (see `with_room`), and the logits of a row are NaN if its
            tokens do not fit.
    """
    check_params(params)
    check_cache(cache)
    check_policy(cache, policy)
    check_same_model(cache, params)
    check_mesh(cache, params)
    check_attached(cache.policy, params)
    check_ids(tokens, params.config.vocab_size)
    tokens = jnp.asarray(tokens).astype(jnp.int32)
    if tokens.ndim != 2 or tokens.shape[0] != cache.batch_size or tokens.shape[1] < 1:
        raise ValueError(f"tokens have shape {tokens.shape}: expected [{cache.batch_size}, N] with N >= 1")
    new, on_host = tokens.shape[1], not isinstance(lengths, jax.Array)
    if lengths is not None:
        check_integers("lengths", lengths)
    check_reading(new, compress)
    given = np.full(tokens.shape[0], new) if lengths is None else lengths
    lengths = jnp.asarray(given).astype(jnp.int32)
    if lengths.shape != cache.length.shape or (on_host and not 0 <= np.min(given) <= np.max(given) <= new):
        raise ValueError(f"lengths={shown(given)} of {new} columns: expected {cache.batch_size} integers in 0 .. {new}")
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((cache, tokens, lengths)))
    if not traced:
        tokens, lengths = map(cache.put_rows, (tokens, lengths))
    steps = new == 1 and cache.filled and compress == "auto"
    if steps:
        if not traced:
            check_room(cache, 1)
        logits, extended = jitted_step(params, cache, tokens[:, 0], lengths > 0)
    else:
        logits, extended = read_prompt(params, cache, Batch(tokens, lengths), compress=compress, traced=traced)
    extended = replace(extended, pending=jnp.where(lengths > 0, -1, cache.pending))
    if traced or not on_host:  # what cannot be an error here shows in the logits
        unsure = traced and (steps or cache.entries.preallocates)
        logits = _marked(logits, cache if unsure else None, lengths, columns=new)
    return logits, extended


@partial(jax.jit, static_argnames="columns")
def _marked(
    logits: Float[Array, "B V"], cache: KVCache | None, lengths: Int[Array, "B"], *, columns: int
) -> Float[Array, "B V"]:
    """The logits, NaN in rows whose tokens did not all fit into the cache, or of which there are not as many.

    Args:
        cache: before the tokens; None if it is known to have room.
    """
    wrong = (lengths < 0) | (lengths > columns)
    if cache is not None:
        wrong |= free_room(cache) < lengths
    return jnp.where(wrong[:, None], jnp.nan, logits)


def check_ids(tokens: ArrayLike, vocab_size: int) -> None:
    """Raises ValueError for ids that are not integers, or, if they are on the host, not in the vocabulary."""
    check_integers("tokens", tokens)
    if isinstance(tokens, jax.Array):
        return
    ids = np.asarray(tokens)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"tokens={shown(tokens)}: expected integers in 0 .. {vocab_size - 1}")


def check_policy(cache: KVCache, policy: Policy | None) -> None:
    """Raises ValueError unless `policy` is None or the one that made the cache."""
    if policy is not None:
        check_is_policy(policy)
        if policy != cache.policy:
            raise ValueError(f"this cache was made by {cache.policy} and cannot be extended with {shown(policy)}")


def check_same_model(cache: KVCache, params: Decoder) -> None:
    """Raises ValueError if a cache has the shapes or the dtype of another model."""
    config = params.config
    entries = cache.entries
    expected = tuple(map(config.heads_of, range(config.num_layers)))
    if entries.heads != expected:
        actual, needs = (
            " and ".join(str((layers, *kind)) for kind, layers in Counter(heads).items())
            for heads in (entries.heads, expected)
        )
        raise ValueError(f"the cache has (layers, kv heads, head size) {actual}: the model needs {needs}")
    states: list[list[tuple[int, ...]]] = [[state.memory.shape[1:] for state in each] for each in cache.recurrent]
    own = config.recurrence
    needed: list[list[tuple[int, ...]]] = (
        [[]] * len(states) if own is None else [[own.memory] * count for count in own.before]
    )
    if states != needed:
        raise ValueError(f"the cache has recurrent states of the shapes {states}: the model needs {needed}")
    if (cache.rope is not None) != config.rope.depends_on_length:
        raise ValueError(f"the cache was made by a model with another RoPE: this model's is {config.rope}")
    if cache.dtype != params.embed.dtype:
        raise ValueError(f"the cache has keys and values of {cache.dtype}: the model needs {params.embed.dtype}")


def check_mesh(cache: KVCache, params: Decoder) -> None:
    """Raises ValueError unless cache and parameters are on the same mesh or device, which `jax.jit` does not show.

    JAX moves what is not committed to a device.
    """
    own, held = params.embed[...], cache.length
    if isinstance(own, jax.core.Tracer):
        return
    mesh = mesh_of(params)
    if cache.mesh != mesh or (mesh is None and len({_device(x) for x in (own, held)} - {None}) > 1):
        raise ValueError(
            f"the cache lies on {_place(held, cache.mesh)}, the parameters on {_place(own, mesh)}: expected the same "
            "for both"
        )


def _place(x: Array, mesh: Mesh | None) -> str:
    """Returns where an array lies, in words."""
    if mesh is None:
        device = _device(x)
        return "one device" if device is None else f"the device {device}"
    return f"a mesh {dict(mesh.shape)} of the devices {cut(', '.join(map(str, mesh.devices.flat)))}"


def _device(x: Any) -> jax.Device | None:
    """Returns the device that an array is committed to; None if it may move, lies on the host, or is being traced."""
    known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed
    return next(iter(x.devices())) if known else None

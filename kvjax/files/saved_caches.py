"""Caches on disk, through Orbax: the arrays, the policy as text, a fingerprint of the model, and checksums."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, UInt32

from kvjax.cache import Entries, Layers, Slots, planned_pool, statics
from kvjax.checkpoint.errors import CheckpointError, orbax_writes
from kvjax.checkpoint.folder import ORBAX
from kvjax.checks import check_params, path_of
from kvjax.extend import check_same_model
from kvjax.files import checksums
from kvjax.files.writing import finish, new_folder
from kvjax.kv_cache import KVCache, check_cache
from kvjax.mesh.sharding import check_batch, fetch, mesh_of, place
from kvjax.models import Decoder
from kvjax.policies import parse
from kvjax.policy import Policy
from kvjax.policy.suits import check_is_policy, check_model
from kvjax.runtime.modes import own_modes

OWNED = re.compile(
    rf"{checksums.NAME}|_CHECKPOINT_METADATA|commit_success\.txt|facts/(metadata|commit_success\.txt)|arrays/{ORBAX}"
)


@own_modes()
def save_cache(path: str | Path, cache: KVCache, params: Decoder, overwrite: bool = False) -> None:
    """Writes a cache of `params` to a folder that `restore_cache` reads.

    The folder changes only when everything is written, so that an error or a kill leaves it as it was. With several
    processes all of them call it, with a path to storage that they share.

    Args:
        path: an empty or absent folder.
        cache: the cache.
        params: the model that the cache was made with.
        overwrite: whether the folder may hold files. A saved cache is then replaced, and all other files stay.

    Raises:
        ValueError: for a cache of another model; for a policy that no text describes to `restore_cache`, such as one
            with parts of a script; if the folder is not empty and `overwrite` is False, if a folder has the name of a
            file to write, or if another process is writing the folder.
        OSError: if the folder or a file cannot be written.
    """
    check_cache(cache)
    check_params(params)
    check_same_model(cache, params)
    check_described(cache.policy)
    arrays = _named(cache)
    facts = {
        "policy": repr(cache.policy),
        "model": fingerprint(params),
        "kept": list(cache.kept),
        "filled": cache.filled,
        "stateless": [not layer.has_state for layer in _layers(cache)],
        "segments": statics(cache.entries),
        "arrays": {name: [list(array.shape), str(array.dtype)] for name, array in arrays.items()},
    }
    some = {name: array for name, array in arrays.items() if array.size}  # Orbax saves no empty array
    saved = ocp.args.Composite(facts=ocp.args.JsonSave(facts), arrays=ocp.args.StandardSave(some))
    with new_folder(path, OWNED, "facts/metadata", overwrite=overwrite) as folder:
        with orbax_writes(), ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(folder, args=saved)
        if jax.process_index() == 0:
            checksums.write_checksums(folder)


def check_described(policy: Policy) -> None:
    """Raises ValueError for a policy whose text does not describe it, so that no cache could be restored."""
    try:
        parse(repr(policy))
    except ValueError as error:
        raise ValueError(
            f"a cache of this policy cannot be restored from a file: {error}, or a part of a package that has presets"
        ) from None


@own_modes()
def restore_cache(path: str | Path, params: Decoder, policy: Policy | None = None) -> KVCache:
    """Reads a cache that `save_cache` wrote onto the devices of the parameters.

    Args:
        params: the model that the cache was made with, on one device or on any mesh.
        policy: a check; it must be the policy that made the cache.

    Raises:
        CheckpointError: if a file of the saved cache is missing or not what was saved. It is a ValueError.
        ValueError: if there is no saved cache, if it belongs to another model or policy, or if its rows or groups of
            heads do not divide over the parameters' mesh.
    """
    check_params(params)
    path = path_of("path", path).resolve()
    facts, like = _checked(path, params, policy)
    check_batch(facts["arrays"]["length"][0][0], like.mesh)
    if like.mesh is None:  # committed to a device as the weights are, so that the programs of other caches serve
        weight = jax.tree.leaves(params)[0]
        return jax.device_put(_read(path, like, _blank(facts)), weight.sharding if weight.committed else None)
    wanted = {
        name: jax.ShapeDtypeStruct(*facts["arrays"][name], sharding=sharding)
        for name, sharding in _named(like.shardings).items()
    }
    return _read(path, like, wanted)


def restore_on_host(path: Path, params: Decoder) -> KVCache:
    """The same cache as NumPy arrays, of any number of rows. The arguments and errors are those of `restore_cache`."""
    path = path.resolve()
    facts, like = _checked(path, params, None)
    return _read(path, like, _blank(facts))


def _checked(path: Path, params: Decoder, policy: Policy | None) -> tuple[dict[str, Any], KVCache]:
    """Returns the facts of a folder about its cache, and a cache of the same structure."""
    finish(path)
    if not (path / "facts").is_dir():
        raise ValueError(f"{path} holds no saved cache: expected a folder written by save_cache")
    if problems := checksums.damages(path, OWNED):
        raise CheckpointError(path, problems)
    facts: dict[str, Any] = json.loads((path / "facts" / "metadata").read_bytes())
    if facts["model"] != fingerprint(params):
        raise ValueError(
            f"the cache in {path} was made with another model than the one given, or with other weights, gates or "
            "statistics: expected the same parameters"
        )
    saved = parse(facts["policy"])
    if policy is not None:
        check_is_policy(policy)
        if policy != saved:
            raise ValueError(f"the cache in {path} was made by {saved}, not by {policy}")
    check_model(saved, params)
    return facts, _like(params, saved, facts)


def _blank(facts: dict[str, Any]) -> dict[str, np.ndarray]:
    """NumPy arrays of the saved shapes, which take no memory."""
    return {name: np.broadcast_to(np.zeros((), dtype), shape) for name, (shape, dtype) in facts["arrays"].items()}


def _read(path: Path, like: KVCache, wanted: dict[str, Any]) -> KVCache:
    """The saved arrays, where those of `wanted` lie, in the structure of a cache. Empty arrays follow from `wanted`."""
    some = {name: array for name, array in wanted.items() if array.size}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(path, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(some))).arrays
    empty = {
        name: x if isinstance(x, np.ndarray) else place(np.zeros(x.shape, x.dtype), x.sharding)
        for name, x in wanted.items()
        if not x.size
    }
    return jax.tree.unflatten(jax.tree.structure(like), [(restored | empty)[name] for name in _named(like)])


def _like(params: Decoder, policy: Policy, facts: dict[str, Any]) -> KVCache:
    """A cache of the same structure as the saved one, for the devices of `params`. Its shapes do not matter."""
    like = KVCache.empty(params.config, policy, jnp.zeros(1, jnp.int32), 1, params.embed.dtype)
    pairs = zip(_layers(like), facts["stateless"], strict=True)
    layers = tuple(layer.without_state() if stateless else layer for layer, stateless in pairs)
    if facts["filled"] and policy.storage.newest is not None:
        logits, settle = params.config.logits_of, policy.storage.settle
        settled = jax.eval_shape(
            lambda: [settle(layer.grow(1), **logits(i)).settled for i, layer in enumerate(like.entries)]
        )
        parts = zip(layers, settled, like.windows, strict=True)
        layers = tuple(layer if window else replace(layer, settled=form) for layer, form, window in parts)
    entries: Entries = Layers(layers)
    if facts["segments"]:
        pool = jax.eval_shape(partial(planned_pool, lanes=1, rows=1, room=0, growing=0), layers)
        entries = replace(pool, **facts["segments"])
    return replace(like, entries=entries, kept=tuple(facts["kept"]), filled=facts["filled"], mesh=mesh_of(params))


def fingerprint(params: Decoder) -> str:
    """A hash of a model's config and of every weight's bits."""
    sums = np.stack([fetch(_checksum(leaf)) for leaf in jax.tree.leaves(params)])
    return hashlib.sha256(repr(params.config).encode() + sums.tobytes()).hexdigest()


@jax.jit
def _checksum(x: Array) -> UInt32[Array, "2"]:
    """Sums of an array's bits, plain and weighted by place. They are integers, so the order does not matter."""
    bits = jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]).astype(jnp.uint32).ravel()
    place = jax.lax.iota(jnp.uint32, bits.size) * jnp.uint32(2654435761) + jnp.uint32(1)
    return jnp.stack([jnp.sum(bits), jnp.sum(bits * place)])


def _layers(cache: KVCache) -> list[Slots]:
    """The shapes of each layer, to see which state it has."""
    return jax.eval_shape(list, cache.entries)


def _named(cache: KVCache) -> dict[str, Array]:
    """The arrays of a cache by their paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(cache)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}

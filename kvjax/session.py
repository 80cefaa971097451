"""A request, checked: everything that can be refused is refused here, before anything is compiled."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from kvjax.cache import KVCache
from kvjax.extend import Compress, check_mesh, check_policy, check_reading
from kvjax.models import Decoder
from kvjax.policies.full import full
from kvjax.policy import Policy
from kvjax.prompts import Batch, Prompt, rows_of
from kvjax.replay import ReplayScore, Texts
from kvjax.sampling import Greedy, SamplingMethod
from kvjax.sharding import check_batch, fetch, mesh_of

ROOM_STEP = 64  # answers are given room in steps of so many tokens, so that few programs serve all limits

EndTokens: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]] | None


@dataclass(frozen=True)
class Session:
    """What a generation starts from.

    Attributes:
        batch: the prompt, each row led by the cache's pending token if it has one.
        cache: to be extended: empty, or with the arrays that are small and pass through its own copy of them.
        ends: end tokens of each row, -1 where a row has fewer than others.
        keys: one PRNG key a row.
        seen: the tokens of the prompt, where the sampler needs them.
        texts: token ids of what the policy's score replays beside the prompt.
    """

    batch: Batch
    cache: KVCache
    ends: Int[np.ndarray, "B E"]
    keys: Array
    seen: Bool[np.ndarray, "B V"] | None
    sampler: SamplingMethod
    texts: Texts = ()

    @classmethod
    def open(
        cls,
        params: Decoder,
        prompt: Prompt | None,
        *,
        policy: Policy | None,
        max_new_tokens: int = 1,
        sampler: SamplingMethod | None = None,
        seed: int | Sequence[int] = 0,
        eos: EndTokens = None,
        tokenizer: Any = None,
        cache: KVCache | None = None,
        chunk: int | None = None,
        compress: Compress = "auto",
    ) -> Session:
        """Checks the arguments of `generate`, which documents them. Raises ValueError for what is not accepted."""
        config, sampler = params.config, sampler or Greedy()
        for name, value, kind in (("policy", policy, Policy), ("cache", cache, KVCache)):
            if value is not None and not isinstance(value, kind):
                hint = f"; kvjax.policies.parse({value!r}) reads one" if isinstance(value, str) else ""
                raise ValueError(f"{name}={value!r}; accepted is a {kind.__name__} or None{hint}")
        if not isinstance(sampler, SamplingMethod):
            raise ValueError(f"sampler={sampler!r}; accepted are kvjax.Greedy() and kvjax.Sampler(...)")
        if not _is_integer(max_new_tokens) or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens!r}; accepted is an integer >= 1")
        check_reading(chunk, compress)
        rows = [] if prompt is None else rows_of(prompt, tokenizer, config.vocab_size, begins=cache is None)
        if cache is not None:
            check_policy(cache, policy)
            check_model(cache, params)
            check_mesh(cache, params)
            rows = _after_pending(cache, rows)
        elif prompt is None:
            raise ValueError("no prompt and no cache to continue; accepted is one of them or both")
        mesh = mesh_of(params)
        check_batch(len(rows), mesh)
        # Pending tokens alone go on as if decoding had not stopped: one decode step, which needs no bucket.
        batch = Batch.of(rows, size=1 if prompt is None else None)
        ends = _end_tokens(eos, tokenizer, len(rows))
        texts = _texts(cache.policy if cache is not None else policy or full(), tokenizer, config.vocab_size)
        keys = _row_keys(seed, len(rows))  # may compile, so it stands after everything that may be refused
        if cache is None:
            size, dtype = batch.tokens.shape[1], params.embed.dtype
            cache = KVCache.empty(config, policy or full(), jnp.asarray(batch.lengths), size, dtype, mesh)
        else:
            cache = _own(cache)
        longest = int(np.max(fetch(cache.length) + batch.lengths)) + max_new_tokens
        if longest > config.max_positions:
            warnings.warn(
                f"positions up to {longest} are asked for and the model was trained for {config.max_positions} "
                f"({config.rope}); RoPE goes on beyond them, but answers usually degrade",
                stacklevel=3,
            )
        seen = None
        if sampler.needs_seen:
            seen = np.zeros((len(rows), config.vocab_size), bool)
            for marks, row in zip(seen, rows, strict=True):
                marks[row] = True
        return cls(batch, cache, ends, keys, seen, sampler, texts)


def room_for(max_new_tokens: int) -> int:
    """Slots set aside for an answer."""
    return -(-max_new_tokens // ROOM_STEP) * ROOM_STEP


def check_model(cache: KVCache, params: Decoder) -> None:
    """Raises ValueError if a cache has the shapes of another model."""
    config = params.config
    if cache.pool is None:
        layers, heads = len(cache.layers), cache.layers[0].keys.shape[1]
    else:
        layers, heads = cache.pool.layers, cache.pool.start.shape[1]
    ours = (layers, heads, cache.head_dim)
    theirs = (config.num_layers, config.num_kv_heads, config.head_dim)
    if ours != theirs:
        raise ValueError(f"the cache has (layers, kv heads, head size) {ours}; the model has {theirs}")
    if (cache.rope is not None) != config.rope.depends_on_length:
        raise ValueError(f"the cache was made by a model of another rotation; this one's is {config.rope}")


def _after_pending(cache: KVCache, rows: list[Int[np.ndarray, "_"]]) -> list[Int[np.ndarray, "_"]]:
    """Each row of a prompt with the cache's pending token before it."""
    pending = fetch(cache.pending)
    rows = rows or [np.zeros(0, np.int32)] * len(pending)
    if len(rows) != len(pending):
        raise ValueError(f"a prompt of {len(rows)} rows for a cache of {len(pending)}; accepted are as many")
    rows = [row if token < 0 else np.concatenate([[token], row]) for token, row in zip(pending, rows, strict=True)]
    if any(row.size == 0 for row in rows):
        raise ValueError("the cache has no pending token to continue from; accepted is a prompt of a token or more")
    return rows


def _own(cache: KVCache) -> KVCache:
    """The same cache with copies of the small arrays that a program may hand through and a later one then donates."""
    copy = jnp.array
    if (pool := cache.pool) is not None:
        small = (copy(x) for x in (pool.start, pool.size, pool.used, pool.capacity))
        start, size, used, capacity = small
        per_row = jax.tree.map(copy, pool.per_row)
        pool = replace(pool, start=start, size=size, used=used, capacity=capacity, per_row=per_row)
    layers = tuple(
        replace(layer, capacity=copy(layer.capacity), per_row=jax.tree.map(copy, layer.per_row))
        for layer in cache.layers
    )
    return replace(
        cache,
        layers=layers,
        length=copy(cache.length),
        rope=jax.tree.map(copy, cache.rope),
        pending=copy(cache.pending),
        pool=pool,
    )


def _texts(policy: Policy, tokenizer: Any, vocab_size: int) -> Texts:
    """What the policy's score replays, as token ids."""
    if not isinstance(policy.score, ReplayScore):
        return ()
    encode = None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
    texts = policy.score.texts(encode)
    for ids in texts:
        if not all(_is_integer(token) and 0 <= token < vocab_size for token in ids):
            raise ValueError(f"{type(policy.score).__name__} replays {ids}; accepted are ids in 0 .. {vocab_size - 1}")
    return texts


def _end_tokens(eos: EndTokens, tokenizer: Any, batch: int) -> Int[np.ndarray, "B E"]:
    if eos is None:
        eos = () if tokenizer is None or tokenizer.eos_token_id is None else tokenizer.eos_token_id
    given: list[Any] = list(eos) if isinstance(eos, Iterable) and not isinstance(eos, str) else [eos]
    by_row = bool(given) and all(isinstance(row, Iterable) and not isinstance(row, str) for row in given)
    rows = [list(row) for row in given] if by_row else [given] * batch
    if not all(_is_integer(token) and token >= 0 for row in rows for token in row):
        raise ValueError(f"eos={eos!r}; accepted are a token id >= 0, several, or a list of them for each row")
    if len(rows) != batch:
        raise ValueError(f"eos has {len(rows)} rows for a batch of {batch}; accepted are ids, or ids for each row")
    ends = np.full((batch, max((len(row) for row in rows), default=0)), -1, np.int32)
    for padded, row in zip(ends, rows, strict=True):
        padded[: len(row)] = row
    return ends


def _row_keys(seed: int | Sequence[int], batch: int) -> Array:
    if isinstance(seed, int | np.integer):
        return jax.random.split(jax.random.key(int(seed)), batch)
    seeds: list[Any] = list(seed) if isinstance(seed, Iterable) else [seed]
    if len(seeds) != batch or not all(map(_is_integer, seeds)):
        raise ValueError(f"seed={seed!r} for a batch of {batch}; accepted are one integer, or one for each row")
    return jnp.stack([jax.random.key(int(s)) for s in seeds])


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)

"""Checks a request. `Request.of` raises for every argument that is not accepted, before anything is compiled."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from kvjax import policies
from kvjax.cache import room_for
from kvjax.checks import check_params, checked_size, counted, is_integer, shown
from kvjax.decoding.loop import Sampling
from kvjax.decoding.sampling import Greedy, SamplingMethod
from kvjax.extend import check_mesh, check_policy, check_same_model
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import check_batch, fetch, mesh_of
from kvjax.models import Decoder
from kvjax.policy import Policy, Texts
from kvjax.policy.suits import check_attached
from kvjax.reading.prompt import Batch, read_prompt
from kvjax.reading.replays import check_one_call, encoded_texts
from kvjax.reading.room import Compress, check_compress, check_reading, ending
from kvjax.request.chat import TemplateOptions, check_template_options
from kvjax.request.ends import EndTokens, default_ends, end_tokens
from kvjax.request.positions import beyond
from kvjax.request.prompts import Prompt, rows_of

ANSWERING = 2  # programs: the first token, and the others
Seed: TypeAlias = int | Sequence[int] | Key[Array, "*B"] | Int[Array, "*B K"]


@dataclass(frozen=True)
class AnswerOptions:
    """The arguments of `generate` that concern the answer, as the caller gave them."""

    max_new_tokens: int
    sampler: SamplingMethod | None = None
    seed: Seed = 0
    eos: EndTokens = None


@dataclass(frozen=True)
class Request:
    """A checked request: a prompt, the cache to read it into, and how to answer it.

    Attributes:
        batch: the prompt. The cache's pending token, if a row has one, precedes the row.
        cache: the cache to extend. It is an empty cache, or the caller's cache with copies of the small arrays.
        texts: token ids that the policy's score replays after the prompt.
        chunk: the number of tokens to read at a time; None reads the prompt in one piece.
        compress: when to compress, as `generate` documents it.
        limit: the most tokens of the answer; 0 if none is asked for.
        sampling: None if no answer is asked for.
    """

    batch: Batch
    cache: KVCache
    texts: Texts = ()
    chunk: int | None = None
    compress: Compress = "auto"
    limit: int = 0
    sampling: Sampling | None = None

    @classmethod
    def of(
        cls,
        params: Decoder,
        prompt: Prompt | None,
        *,
        policy: Policy | str | None = None,
        tokenizer: Any = None,
        cache: KVCache | None = None,
        chunk: int | None = None,
        compress: Compress = "auto",
        answer: AnswerOptions | None = None,
        chat_template_kwargs: TemplateOptions = None,
    ) -> Request:
        """Checks the arguments of `generate`, which documents them; without `answer`, those of `prefill`.

        Raises:
            ValueError: for an argument that is not accepted, before anything is compiled.
        """
        check_params(params)
        check_tokenizer(tokenizer)
        config, policy = params.config, as_policy(policy)
        if cache is not None and not isinstance(cache, KVCache):
            raise ValueError(f"cache={shown(cache)}: expected a KVCache or None")
        limit = 0
        if answer is not None:
            check_sampler(answer.sampler)
            limit = checked_size("max_new_tokens", answer.max_new_tokens)
        check_reading(chunk, compress)
        begins = cache is None or not fetch(cache.length).any()
        rows = []
        if prompt is not None:
            rows = rows_of(
                prompt,
                tokenizer,
                config.vocab_size,
                begins=begins,
                answered=answer is not None,
                chat_template_kwargs=chat_template_kwargs,
            )
        else:
            check_template_options(chat_template_kwargs, "the prompt", messages=False)
        if cache is not None:
            check_policy(cache, policy)
            check_same_model(cache, params)
            check_mesh(cache, params)
            rows = _after_pending(cache, rows)
        elif prompt is None:
            raise ValueError("prompt=None and cache=None: expected a prompt, a cache to continue, or both")
        under = cache.policy if cache is not None else policy or policies.full()
        check_attached(under, params)
        mesh = mesh_of(params)
        check_batch(len(rows), mesh)
        # Without a prompt the pending tokens are decoded in one step, which needs no bucket.
        batch = Batch.of(rows, size=1 if prompt is None else None)
        replays = True
        if cache is None:
            check_compress(under, compress, filled=False)
        elif replays := ending(cache, compress).allocate:
            check_one_call(under, begins)
        texts = texts_of(under, tokenizer, config.vocab_size) if replays else ()
        sampling = None if answer is None else _sampling(answer, params, tokenizer, rows, begins=prompt is not None)
        # Everything has been checked. From here on programs may be compiled.
        if cache is None:
            size, dtype = batch.tokens.shape[1], params.embed.dtype
            cache = KVCache.empty(config, under, jnp.asarray(batch.lengths), size, dtype, mesh)
        else:
            cache = cache.private() if cache.batch_size == len(rows) else cache.repeated(len(rows))
            nothing = jnp.asarray(np.full(len(rows), -1, np.int32))  # the batch has the tokens that were pending
            cache = replace(cache, pending=cache.put_rows(nothing))
            if not cache.filled:
                cache = cache.for_prompts(fetch(cache.length) + batch.lengths)
        longest = int(np.max(fetch(cache.length) + batch.lengths)) + limit
        if (told := beyond(config, longest, "the request reaches")) is not None:
            warnings.warn(told, stacklevel=4)  # the caller of a public function, which `own_modes` wraps
        return cls(batch, cache, texts, None if chunk is None else int(chunk), compress, limit, sampling)

    @property
    def room(self) -> int:
        """The number of slots to leave for the answer."""
        return room_for(self.limit)


def read_request(params: Decoder, request: Request) -> tuple[Float[Array, "B V"], KVCache]:
    """Reads a request's prompt into its cache.

    Returns:
        Float32 logits after each row's last token, and the extended cache with room for the answer.
    """
    return read_prompt(
        params,
        request.cache,
        request.batch,
        room=request.room,
        chunk=request.chunk,
        compress=request.compress,
        texts=request.texts,
        more=0 if request.sampling is None else ANSWERING,
    )


def as_policy(policy: Policy | str | None) -> Policy | None:
    """Returns the policy, or the one that a text such as "morphkv:budget=512" describes. Raises ValueError."""
    if isinstance(policy, str):
        return policies.parse(policy)
    if policy is not None and not isinstance(policy, Policy):
        raise ValueError(f"policy={shown(policy)}: expected a Policy, a text such as 'morphkv:budget=512', or None")
    return policy


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ValueError unless `tokenizer` is None or has what prompts and answers need."""
    if tokenizer is not None and not (hasattr(tokenizer, "decode") and hasattr(tokenizer, "eos_token_id")):
        raise ValueError(
            f"tokenizer is of type {type(tokenizer).__name__}: expected a tokenizer of transformers or None"
        )


def _after_pending(cache: KVCache, rows: list[Int[np.ndarray, "_"]]) -> list[Int[np.ndarray, "_"]]:
    """Returns each row of a prompt with the cache's pending token before it."""
    pending = fetch(cache.pending)
    if pending.size == 1:  # one document for all rows
        pending = np.repeat(pending, max(len(rows), 1))
    rows = rows or [np.zeros(0, np.int32)] * len(pending)
    if len(rows) != len(pending):
        raise ValueError(
            f"the prompt has {counted(len(rows), 'row')}: expected {len(pending)}, the number of rows of the cache"
        )
    rows = [row if token < 0 else np.concatenate([[token], row]) for token, row in zip(pending, rows, strict=True)]
    if any(row.size == 0 for row in rows):
        raise ValueError("prompt=None and the cache has no pending token: expected a prompt of at least one token")
    return rows


def texts_of(policy: Policy, tokenizer: Any, vocab_size: int) -> Texts:
    """Returns the token ids that the policy's score replays. Raises ValueError if they cannot be encoded."""
    encode = None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
    texts = encoded_texts(policy, encode)
    for ids in texts:
        if not all(is_integer(token) and 0 <= token < vocab_size for token in ids):
            raise ValueError(f"the policy replays {ids}: expected ids in 0 .. {vocab_size - 1}")
    return texts


def check_sampler(sampler: Any) -> None:
    """Raises ValueError unless `sampler` is None or a sampler."""
    if sampler is not None and not isinstance(sampler, SamplingMethod):
        raise ValueError(f"sampler={shown(sampler)}: expected kvjax.Greedy(), kvjax.Sampler(...) or None")


def _sampling(
    answer: AnswerOptions, params: Decoder, tokenizer: Any, rows: Sequence[Int[np.ndarray, "_"]], *, begins: bool
) -> Sampling:
    sampler, suppressed = answer.sampler or Greedy(), params.card.suppressed
    if not begins:  # the first token of what goes on is not that of the answer
        suppressed = suppressed._replace(first=())
    ends = end_tokens(answer.eos, default_ends(params, tokenizer), len(rows), params.config.vocab_size)
    seen = None
    if sampler.needs_seen:
        seen = np.zeros((len(rows), params.config.vocab_size), bool)
        for marks, row in zip(seen, rows, strict=True):
            marks[row] = True
    return Sampling(sampler, ends, _row_keys(answer.seed, len(rows)), seen, suppressed)


def _row_keys(seed: Any, batch: int) -> Key[Array, "B"]:
    """Returns one typed key per row. One seed or key for the whole batch is split over the rows."""
    if isinstance(seed, jax.Array):
        return _keys_of(seed, batch)
    given = seed.tolist() if isinstance(seed, np.ndarray) else seed
    if is_seed(given):
        return jax.random.split(jax.random.key(int(given)), batch)
    seeds: list[Any] = list(given) if isinstance(given, Sequence) and not isinstance(given, bytes) else [given]
    if len(seeds) != batch or not all(map(is_seed, seeds)):
        raise ValueError(f"seed={shown(seed)}: {_expected_seed(batch)}")
    return jnp.stack([jax.random.key(int(s)) for s in seeds])


def _keys_of(seed: Array, batch: int) -> Key[Array, "B"]:
    """Returns the keys of a typed key [] or [B], or of a legacy key [K] or [B, K]. They are copies."""
    typed = jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key)
    shape = seed.shape
    if not typed and seed.dtype == jnp.uint32:
        legacy = jax.eval_shape(jax.random.PRNGKey, 0)
        typed, shape = shape[-1:] == legacy.shape, shape[:-1]
    if not typed or shape not in ((), (batch,)):
        raise ValueError(f"seed is a JAX array of dtype {seed.dtype} and shape {seed.shape}: {_expected_seed(batch)}")
    keys = seed if shape == seed.shape else jax.random.wrap_key_data(seed)
    if not shape:
        return jax.random.split(keys, batch)
    # The decoding loop donates its keys, and these are the caller's.
    return jax.random.wrap_key_data(jnp.array(jax.random.key_data(keys)), impl=jax.random.key_impl(keys))


def _expected_seed(batch: int) -> str:
    return (
        f"expected an integer of 64 bits or a JAX key, or for each of {batch} rows one integer or a JAX array of keys"
    )


def is_seed(value: Any) -> bool:
    """Returns whether a value is an integer of 64 bits."""
    return is_integer(value) and -(2**63) <= value < 2**63

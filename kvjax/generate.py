"""`generate` and `prefill`: a prompt is read once, and one jitted loop then decodes until every row has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kvjax.checks import check_truth, counted, shown
from kvjax.decoding.each_token import decode_until
from kvjax.decoding.loop import NOT_FINITE, Decoding, decode, decode_in_parts, not_finite
from kvjax.decoding.row_text import RowText, stop_strings
from kvjax.decoding.sampling import SamplingMethod
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import fetch
from kvjax.models import Decoder
from kvjax.plan import full_bytes
from kvjax.policy import Policy
from kvjax.reading.room import Compress
from kvjax.request.chat import TemplateOptions
from kvjax.request.ends import EndTokens
from kvjax.request.prompts import Prompt, is_single
from kvjax.request.request import AnswerOptions, Request, Seed, read_request
from kvjax.runtime.clock import Clock, clock_of
from kvjax.runtime.modes import own_modes
from kvjax.runtime.progress import closely_watched


@dataclass(frozen=True)
class Stats:
    """The measurements of one call of `generate`. Times are wall-clock seconds; compilation is counted apart.

    Attributes:
        prompt_tokens: tokens that were read, summed over the rows. A pending token of the cache is one of them.
        decoded_tokens: tokens that took a decode step, summed over the rows. The first token of each row is sampled
            from the prompt's logits and is not counted.
        prefill_seconds: time in the programs that read and compress the prompt.
        decode_seconds: time in the decoding loop.
        compile_seconds: time for tracing and compiling these programs.
        cache_bytes: size of the final cache: keys, values, positions and the policy's state. Slots for tokens to come
            are counted, too.
        full_cache_bytes: what a cache of the policy `full` would take for the same rows, with the same slots for tokens
            to come.
    """

    prompt_tokens: int
    decoded_tokens: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    cache_bytes: int
    full_cache_bytes: int

    @property
    def decode_tokens_per_second(self) -> float:
        """Decoded tokens of all rows per second; 0 if nothing was decoded."""
        return self.decoded_tokens / self.decode_seconds if self.decoded_tokens else 0.0

    @property
    def compression_ratio(self) -> float:
        """The size of a full cache, divided by the size of this one; 1 for the policy `full`."""
        return self.full_cache_bytes / self.cache_bytes


@dataclass(frozen=True)
class Generation:
    """The answers of one call of `generate`, the cache after them, and what the call took.

    Attributes:
        tokens: int32 ids, -1 after the end of a row. An end token belongs to its row. T is the longest answer's length.
        lengths: int32, the number of tokens of each answer.
        text: the answer as text without special tokens: a string if the prompt was one row by itself, such as a string
            or a list of chat messages, and a list of one string per row otherwise. None without a tokenizer.
        log_probs: float32 natural log-probability of each token under the unmodified model, 0 after the end of a row;
            None unless asked for.
        cache: continues the dialogue as the `cache=` of a later call. The last token of each row has no entry in it
            yet: it is `cache.pending`.
        stats: times, counts and sizes.
    """

    tokens: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, "B"]
    text: str | list[str] | None
    log_probs: Float[np.ndarray, "B T"] | None
    cache: KVCache
    stats: Stats

    def __repr__(self) -> str:
        said = "" if self.text is None else f"{shown(self.text, most=60)}, "
        counts = f"{counted(len(self.lengths), 'row')}, {counted(int(self.lengths.sum()), 'token')}"
        return f"Generation({said}{counts}, {self.cache})"


@own_modes()
def generate(
    params: Decoder,
    prompt: Prompt | None,
    *,
    policy: Policy | str | None = None,
    max_new_tokens: int = 128,
    sampler: SamplingMethod | None = None,
    seed: Seed = 0,
    eos: EndTokens = None,
    stop: str | Sequence[str] = (),
    tokenizer: Any = None,
    cache: KVCache | None = None,
    log_probs: bool = False,
    chunk: int | None = None,
    compress: Compress = "auto",
    chat_template_kwargs: TemplateOptions = None,
) -> Generation:
    """Answers a batch of prompts under a cache policy.

    Rows of different lengths get the same tokens as each row alone. Programs are compiled once per bucket of lengths.

    A prompt of chat messages is rendered by the tokenizer's chat template with the generation prompt at its end. The
    template writes all special tokens, so the tokenizer adds none. With `cache=`, the template is applied to the new
    messages alone, and the result is appended to what the cache has seen. Three things follow:

    * A BOS token at the beginning of the result is dropped, as it is from text.
    * Whatever else the template writes at the beginning of every conversation, such as a default system message, is
      written again.
    * The previous answer ends as the model ended it. If `max_new_tokens` cut it off, no end token follows it. Text that
      the template puts after an end token, such as ChatML's line break, is missing.

    Args:
        params: the decoder, an nnx module `Decoder` that `load` returns.
        prompt: one of these. None continues `cache` from its pending tokens.

            | one row | a batch |
            |---|---|
            | a string | a list of strings |
            | a list of token ids | a list of such lists, whose lengths may differ |
            | an integer array [N] | an integer array [B, N] |
            | what `tokenizer(text)` returns, with its attention mask | what `tokenizer(texts, padding=True)` returns |
            | a list of chat messages: dicts with strings "role" and "content" | a list of such lists |
        policy: what the cache retains: a policy, or a text that `policies.parse` reads, such as "morphkv:budget=512".
            The default is the policy of `cache`, or `policies.full()`.
        max_new_tokens: the most tokens that a row's answer may have.
        sampler: draws the tokens. The default is `Greedy()`, whatever the checkpoint says (`params.card.sampler`).
        seed: determines the draws, by one of these. A sequence of integers may be a NumPy array.

            | seed | the draws of row b depend on |
            |---|---|
            | an integer s of 64 bits | s, b and the token's position; `jax.random.key(s)` gives the same draws |
            | a JAX key | the key, b and the position |
            | one integer per row | the row's integer and the position |
            | a JAX array of one key per row, shape [B] | the row's key and the position |

            A JAX key is a typed key of `jax.random.key`, or a legacy uint32 key of `jax.random.PRNGKey`. With a PRNG
            other than the default "threefry2x32", the draws may depend on the other rows too.
        eos: an end token, a list of end tokens, or a list of them per row. `()` means that no token ends a row. The
            default is what the checkpoint states (`params.card.end_tokens`), the tokenizer's end token, and the token
            that ends a turn in its chat template.
        stop: a string that ends a row, or a list of such strings; special tokens such as "<|im_end|>" stand alone. A
            row's text ends before its stop string, while the tokens of the stop string are in the cache. Stop strings
            need a fast tokenizer and one program call per token.
        tokenizer: a transformers tokenizer. It encodes text and messages and decodes the answers. Text gets the
            tokenizer's special tokens, unless it begins with them, as text of a chat template does, or continues a
            cache. Padding at the ends of rows of ids is dropped with a warning, or refused if the padding token is a
            BOS or end token too.
        chat_template_kwargs: options of the chat template, such as {"enable_thinking": False}; only for messages.
        cache: the `Generation.cache` of an earlier call, or the result of `prefill`. The call extends a copy and leaves
            the given cache as it is. A cache of one row is repeated for each row of the prompt.
        log_probs: whether to return the log-probability of each token.
        chunk: the number of prompt tokens to read at a time, which takes less memory. The result is the same as in one
            piece, unless `compress` is "chunk".
        compress: when to compress the cache to its budget:

            | compress | when |
            |---|---|
            | "auto" | after the first prompt, and after later prompts if the policy evicts while decoding |
            | "end" | after every prompt, whatever the policy |
            | "never" | not after this prompt, whatever the policy |
            | "chunk" | after each chunk, so that the memory for a prompt does not grow with its length |

    Raises:
        ValueError: for any argument that is not accepted, before anything is compiled. The message says what is
            expected.
        FloatingPointError: logits are NaN or infinite. The message names the row and the position.
    """
    check_truth("log_probs", log_probs)
    stops = stop_strings(stop, tokenizer)
    answer = AnswerOptions(max_new_tokens, sampler, seed, eos)
    request = Request.of(
        params,
        prompt,
        policy=policy,
        tokenizer=tokenizer,
        cache=cache,
        chunk=chunk,
        compress=compress,
        answer=answer,
        chat_template_kwargs=chat_template_kwargs,
    )
    clock, read = Clock(), int((fetch(request.cache.length) + request.batch.lengths).max())
    logits, filled = clock.run("prefill", read_request, params, request)
    state = Decoding.begin(request.sampling, filled, size=request.room, log_probs=log_probs)
    said: list[str] | None = None
    if stops:
        rows = [RowText(tokenizer, stops) for _ in request.batch.lengths]
        state, said = clock.run("decode", decode_until, params, state, logits, request.limit, rows)
    elif closely_watched():
        state = clock.run("decode", decode_in_parts, params, state, logits, request.limit)
    else:
        state, _ = clock.run("decode", decode, params, state, logits, np.int32(request.limit))
    answers, cache = state.answers, state.cache
    lengths = fetch(answers.lengths)
    longest = int(lengths.max())
    tokens = fetch(answers.tokens)[:, :longest]
    for row, n in enumerate(lengths):
        if tokens[row, n - 1] == NOT_FINITE:
            raise not_finite(row, int(fetch(cache.length)[row]))
    text: str | list[str] | None = None
    if tokenizer is not None:
        decoded = (_text(tokenizer, row[:n]) for row, n in zip(tokens, lengths, strict=True))
        text = list(decoded) if said is None else said
        text = text[0] if is_single(prompt) else text
    return Generation(
        tokens=tokens,
        lengths=lengths,
        text=text,
        log_probs=None if answers.log_probs is None else fetch(answers.log_probs)[:, :longest],
        cache=cache,
        stats=Stats(
            prompt_tokens=int(request.batch.lengths.sum()),
            decoded_tokens=int((lengths - 1).sum()),
            prefill_seconds=clock.seconds["prefill"],
            decode_seconds=clock.seconds["decode"],
            compile_seconds=clock.seconds["compile"],
            cache_bytes=cache.nbytes,
            full_cache_bytes=full_bytes(cache, params.config, read, request.limit),
        ),
    )


def _text(tokenizer: Any, tokens: Int[np.ndarray, "n"]) -> str:
    """The text of an answer, with the spaces that its tokens have: those that come one by one keep theirs too."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@own_modes()
def prefill(
    params: Decoder,
    prompt: Prompt,
    *,
    policy: Policy | str | None = None,
    tokenizer: Any = None,
    cache: KVCache | None = None,
    chunk: int | None = None,
    compress: Compress = "auto",
    chat_template_kwargs: TemplateOptions = None,
    clock: Clock | None = None,
) -> KVCache:
    """Reads a prompt into a cache, without an answer.

    Several questions can then be asked of one document: `generate(params, question, cache=document)`. A cache that was
    read with `compress="never"` counts as unfinished: the next prompt that is read into it continues this one, and a
    budget that is a share of the prompt is a share of both.

    Args:
        params: the decoder, an nnx module `Decoder` that `load` returns.
        prompt, policy, tokenizer, cache, chunk, compress, chat_template_kwargs: as `generate` takes them. Chat messages
            end without the generation prompt, because the next messages follow them.
        clock: adds up the seconds of the reading under "prefill", and those of compiling under "compile".

    Raises:
        ValueError: for any argument that is not accepted, before anything is compiled.
    """
    clock = clock_of(clock)
    request = Request.of(
        params,
        prompt,
        policy=policy,
        tokenizer=tokenizer,
        cache=cache,
        chunk=chunk,
        compress=compress,
        chat_template_kwargs=chat_template_kwargs,
    )
    return clock.run("prefill", read_request, params, request)[1]

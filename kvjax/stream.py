"""`stream`: the steps of `generate`, one program call per token, whose tokens and text are yielded as they come."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from kvjax.decoding.each_token import decode_each
from kvjax.decoding.loop import Decoding
from kvjax.decoding.row_text import RowText, check_fast, stop_strings
from kvjax.decoding.sampling import SamplingMethod
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.reading.room import Compress
from kvjax.request.chat import TemplateOptions
from kvjax.request.ends import EndTokens
from kvjax.request.prompts import Prompt
from kvjax.request.request import AnswerOptions, Request, Seed, read_request
from kvjax.runtime.modes import own_modes


@dataclass(frozen=True)
class Piece:
    """The tokens and the text that one step adds to each row.

    Attributes:
        tokens: int32, one id per row, -1 where the row ended in an earlier step.
        text: the text that each row gains; None without a tokenizer. Text that may be the beginning of an incomplete
            character or of a stop string is held back until that is decided.
        active: rows that continue after this step.
        cache: in the last piece, the cache after the answers, as `Generation.cache`. None in the pieces before it; a
            stream that is left earlier has it in `Stream.cache`.
    """

    tokens: Int[np.ndarray, "B"]
    text: list[str] | None
    active: Bool[np.ndarray, "B"]
    cache: KVCache | None = None


@own_modes()
def stream(
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
    chunk: int | None = None,
    compress: Compress = "auto",
    chat_template_kwargs: TemplateOptions = None,
) -> Stream:
    """Yields the answers of `generate` piece by piece. The arguments are those of `generate`.

    A caller that stops early closes the stream, whose `cache` then continues the dialogue.

    Args:
        params: the decoder, an nnx module `Decoder` that `load` returns.

    Raises:
        ValueError: at the call and before anything is compiled, for any argument that is not accepted.
        FloatingPointError: while the stream is read, if logits are NaN or infinite.
    """
    stops = stop_strings(stop, tokenizer)
    if tokenizer is not None:
        check_fast(tokenizer)
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
    return Stream(params, request, stops, tokenizer)


class Stream(Iterator[Piece]):
    """An iterator over the pieces of an answer.

    Attributes:
        cache: once the stream has ended or was closed, the cache after the pieces that it yielded. The last token of
            each row is pending in it, as after `generate`. None before that, if no piece was yielded, and after an
            error, such as FloatingPointError.
    """

    def __init__(self, params: Decoder, request: Request, stops: list[str], tokenizer: Any):
        self.cache: KVCache | None = None
        self._pieces = self._read(params, request, stops, tokenizer)

    @own_modes()
    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the stream. The next token is not computed."""
        self._pieces.close()

    def _read(
        self, params: Decoder, request: Request, stops: list[str], tokenizer: Any
    ) -> Generator[Piece, None, None]:
        """Yields the pieces, and keeps the cache when the last one is yielded or the generator is closed."""
        logits, filled = read_request(params, request)
        state = Decoding.begin(request.sampling, filled, size=0, log_probs=False)
        texts = None if tokenizer is None else [RowText(tokenizer, stops) for _ in request.batch.lengths]
        for step in decode_each(params, state, logits, request.limit, texts):
            cache, ends = step.state.cache, not step.active.any()
            if ends:
                self.cache = cache
            try:
                yield Piece(step.tokens, step.text, step.active, cache if ends else None)
            except GeneratorExit:
                self.cache = cache
                raise

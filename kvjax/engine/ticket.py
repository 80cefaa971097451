"""A checked request of an engine: the arrays that start it, and how its tokens become an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from kvjax.checks import is_integer
from kvjax.prompts import Prompt, is_single, rows_of
from kvjax.request import AnswerOptions, EndTokens, check_answer, sampling_of
from kvjax.row_samplers import RowSamplers
from kvjax.row_text import RowText, stop_strings
from kvjax.sampling import Greedy, SamplingMethod
from kvjax.shown import shown

from .handle import Feed, Finish, Token
from .resident import Start
from .sizes import Sizes


@dataclass(frozen=True)
class Options:
    """The arguments of `Engine.submit` that concern the answer, as the caller gave them."""

    max_new_tokens: int | None = None
    sampler: SamplingMethod | None = None
    seed: int = 0
    eos: EndTokens = None
    stop: str | Sequence[str] = ()
    log_probs: bool = False


@dataclass(eq=False)
class Ticket:
    """A request on its way. The loop alone changes it, but for `cancelled`, which any thread may set.

    Attributes:
        prompt: int32 token ids.
        start: the arrays that start the answer, with an axis of one row.
        ends: the end tokens.
        limit: the most tokens of the answer.
        log_probs: whether tokens have log-probabilities.
        text: decodes the tokens; None without a tokenizer.
        feed: where the tokens go.
        submitted: the time of the request, of `time.perf_counter`.
        last: the time of its last token.
        cancelled: whether the answer is not wanted any more.
    """

    prompt: Int[np.ndarray, "N"]
    start: Start
    ends: frozenset[int]
    limit: int
    log_probs: bool
    text: RowText | None
    feed: Feed = field(default_factory=Feed)
    submitted: float = field(default_factory=time.perf_counter)
    last: float | None = None
    cancelled: bool = False

    @classmethod
    def of(cls, prompt: Prompt, options: Options, sizes: Sizes, tokenizer: Any, vocab_size: int) -> Ticket:
        """Checks a request.

        Raises:
            ValueError: for whatever the engine does not accept. The message says what is expected.
        """
        limit = sizes.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
        check_answer(AnswerOptions(limit, options.sampler))
        if limit > sizes.max_new_tokens:
            raise ValueError(f"max_new_tokens={limit}: expected at most the engine's {sizes.max_new_tokens}")
        if not is_integer(options.seed):
            raise ValueError(f"seed={shown(options.seed)}: expected an integer of 64 bits")
        if not isinstance(options.log_probs, bool):
            raise ValueError(f"log_probs={shown(options.log_probs)}: expected True or False")
        rows = rows_of(prompt, tokenizer, vocab_size, begins=True)
        if not is_single(prompt) or len(rows) != 1:
            raise ValueError(f"the prompt has {len(rows)} rows: expected one prompt per request, without a batch axis")
        row = rows[0].astype(np.int32)
        if row.size > sizes.max_prompt:
            raise ValueError(f"the prompt has {row.size} tokens: expected at most max_prompt={sizes.max_prompt}")
        stops = stop_strings(options.stop, tokenizer)
        sampler = options.sampler or Greedy()
        answer = AnswerOptions(limit, options.sampler, options.seed, options.eos)
        sampling = sampling_of(answer, tokenizer, rows, vocab_size)
        given = sampling.ends.shape[1]
        if given > sizes.ends:
            raise ValueError(f"eos has {given} tokens: expected at most {sizes.ends} (Engine(max_end_tokens=...))")
        seen = np.zeros((1, vocab_size), bool)
        seen[0, row] = True
        return cls(
            prompt=row,
            start=Start(
                sampler=RowSamplers.of([sampler]),
                ends=np.pad(sampling.ends, ((0, 0), (0, sizes.ends - given)), constant_values=-1),
                keys=np.asarray(jax.random.key_data(sampling.keys)),
                seen=seen,
                limit=np.array([limit], np.int32),
            ),
            ends=frozenset(sampling.ends[0].tolist()),
            limit=int(limit),
            log_probs=options.log_probs,
            text=None if tokenizer is None else RowText(tokenizer, stops),
        )

    def take(self, token: int, log_prob: float, active: bool) -> bool:
        """Adds a token to the answer, and returns whether the answer goes on.

        Args:
            active: whether the row goes on, as the device sees it.
        """
        text = None if self.text is None else self.text.add(token, last=not active)
        finish: Finish | None = None
        if self.text is not None and self.text.stopped:
            finish = "stop"
        elif not active:
            finish = "end" if token in self.ends else "length"
        self.feed.add(Token(token, text, log_prob if self.log_probs else None), finish)
        return finish is None

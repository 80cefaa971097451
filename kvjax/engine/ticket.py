"""A checked request of an engine: the arrays that start it, and how its tokens become an answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int

from kvjax.checks import check_truth, checked_size, counted, shown
from kvjax.decoding.grammars import Grammars
from kvjax.decoding.loop import NOT_FINITE, not_finite
from kvjax.decoding.row_samplers import RowSamplers
from kvjax.decoding.row_text import RowText, shown_ids, stop_strings
from kvjax.decoding.sampling import Greedy, SamplingMethod
from kvjax.models import NONE_SUPPRESSED, Suppressed
from kvjax.request.chat import TemplateOptions
from kvjax.request.ends import EndTokens, end_tokens
from kvjax.request.prompts import Prompt, is_single, rows_of
from kvjax.request.request import check_sampler, is_seed

from .guide import Guide, Guided
from .handle import Feed, Finish, Token, Top
from .plans import check_length
from .resident import Start
from .reuse import Wanted
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
    prefix: Prompt | None = None
    chat_template_kwargs: TemplateOptions = None
    shown_tokens: Sequence[str] = ()
    guide: Guide | None = None
    reuse: bool = True


@dataclass(eq=False)
class Ticket:
    """A request on its way. The loop alone changes it, but for `cancelled`, which any thread may set.

    Attributes:
        prompt: int32 token ids.
        prefix: int32 token ids of the prefix that precedes the prompt, or None.
        start: the arrays that start the answer, with an axis of one row.
        ends: the end tokens.
        limit: the most tokens of the answer.
        log_probs: whether tokens have log-probabilities.
        text: decodes the tokens; None without a tokenizer.
        shown: special tokens that the text names.
        guided: what the host has a part in; None for most requests.
        echoed: the tokens of a prompt that is scored; else none.
        continues: whether it may continue a conversation, and later requests this one.
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
    shown: frozenset[int] = frozenset()
    guided: Guided | None = None
    echoed: Int[np.ndarray, "N"] = field(default_factory=lambda: np.zeros(0, np.int32))
    prefix: Int[np.ndarray, "N"] | None = None
    continues: bool = False
    feed: Feed = field(default_factory=Feed)
    submitted: float = field(default_factory=time.perf_counter)
    last: float | None = None
    cancelled: bool = False

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        options: Options,
        sizes: Sizes,
        tokenizer: Any,
        vocab_size: int,
        suppressed: Suppressed = NONE_SUPPRESSED,
        grammars: Grammars | None = None,
    ) -> Ticket:
        """Checks a request to a model that never draws the tokens `suppressed`, but for the length of its prompt.

        `grammars` compiles those of guides; None refuses guides.

        Raises:
            ValueError: for whatever the engine does not accept. The message says what is expected.
        """
        check_sampler(options.sampler)
        asked = sizes.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
        limit = checked_size("max_new_tokens", asked)
        if limit > sizes.max_new_tokens:
            raise ValueError(f"max_new_tokens={limit}: expected at most the engine's {sizes.max_new_tokens}")
        if not is_seed(options.seed):
            raise ValueError(f"seed={shown(options.seed)}: expected an integer of 64 bits")
        for name in ("log_probs", "reuse"):
            check_truth(name, getattr(options, name))
        if options.guide is not None and (not isinstance(options.guide, Guide) or grammars is None):
            raise ValueError(f"guide={shown(options.guide)}: expected a Guide, and Engine(..., guided=True)")
        row_of = partial(
            _row, tokenizer=tokenizer, vocab_size=vocab_size, chat_template_kwargs=options.chat_template_kwargs
        )
        prefix = None
        if options.prefix is not None:
            prefix = row_of("prefix", options.prefix, begins=True, answered=False)
            check_length("prefix", prefix.size, "max_prompt", sizes.max_prompt)
        row = row_of("prompt", prompt, begins=prefix is None, answered=True)
        echoed = row[:0]
        if options.guide is not None and options.guide.echo:
            if prefix is not None or options.stop:
                raise ValueError(
                    "echo=True with a prefix or stop strings: expected neither, because it scores the prompt"
                )
            row, echoed, limit = row[:1], row, limit + row.size - 1
            check_length("prompt that is scored, and its answer", limit, "max_new_tokens", sizes.max_new_tokens)
        stops = stop_strings(options.stop, tokenizer)
        sampler = options.sampler or Greedy()
        ends = end_tokens(options.eos, (), 1, vocab_size)
        closes = frozenset(ends[0].tolist())
        named = shown_ids(options.shown_tokens, tokenizer) - closes
        guided = None
        if options.guide is not None:
            assert grammars is not None
            guided = Guided(options.guide, grammars, vocab_size, closes, echoed[1:])
        given = ends.shape[1]
        if given > sizes.ends:
            raise ValueError(f"eos has {given} tokens: expected at most {sizes.ends} (Engine(max_end_tokens=...))")
        seen = np.zeros((1, vocab_size), bool)
        seen[0, row] = True
        return cls(
            prompt=row,
            start=Start(
                sampler=RowSamplers.of([sampler]),
                ends=np.pad(ends, ((0, 0), (0, sizes.ends - given)), constant_values=-1),
                seed=np.array([int(options.seed) & 0xFFFFFFFF], np.uint32).view(np.int32),
                seen=seen,
                limit=np.array([limit], np.int32),
                suppressed=suppressed,
            ),
            ends=closes,
            limit=limit,
            log_probs=options.log_probs,
            text=None if tokenizer is None else RowText(tokenizer, stops, named),
            shown=named,
            guided=guided,
            echoed=echoed,
            prefix=prefix,
            continues=options.reuse and not echoed.size,
        )

    @property
    def wanted(self) -> Wanted:
        """The facts that decide how it is read."""
        return Wanted(self.prompt, self.prefix, self.limit, self.continues)

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of prefix and prompt."""
        return self.prompt.size + (0 if self.prefix is None else self.prefix.size)

    def seen(self, new: Sequence[Token]) -> Int[np.ndarray, "N"]:
        """The tokens that the row's cache has seen once the answer ends with new ones: the last one has no entry."""
        answer = np.array([token.id for token in (*self.feed.tokens, *new)], np.int32)
        return np.concatenate([self.wanted.tokens, answer[:-1]])

    def take(
        self, tokens: Sequence[int], log_probs: Sequence[float], active: bool, top: Sequence[np.int32] = ()
    ) -> Iterator[tuple[Token, Finish | None]]:
        """Yields the next tokens for the feed, up to a stop string; with the last of an answer, why it ends.

        Args:
            active: whether the row goes on after all of them, as the device sees it.
            top: if there is a guide, the most probable tokens in place of the only token, and their
                log-probabilities' bits.

        Raises:
            FloatingPointError: the logits of a token are not finite.
            GrammarError: a token does not follow the grammar.
        """
        for i, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True), 1):
            if token == NOT_FINITE:
                raise not_finite(0, self.prompt_tokens + len(self.feed.tokens) + i - 1)
            complete = self.guided is not None and self.guided.take(token)
            last = complete or (i == len(tokens) and not active)
            text = None
            finish: Finish | None = ("end" if complete or token in self.ends else "length") if last else None
            if self.text is not None:
                text = self.text.add(token, last=last)
                finish = "stop" if self.text.stopped else finish
            yield Token(token, text, log_prob if self.log_probs else None, self._top(top)), finish
            if finish is not None:
                return

    def _top(self, top: Sequence[np.int32]) -> Top:
        """The most probable tokens, as many as the guide asks for."""
        if self.guided is None or not self.guided.top:
            return ()
        ids, bits = np.split(np.array(top, np.int32), 2)
        return tuple(zip(ids.tolist(), bits.view(np.float32).tolist(), strict=True))[: self.guided.top]


def _row(name: str, prompt: Prompt, tokenizer: Any, vocab_size: int, **options: Any) -> Int[np.ndarray, "N"]:
    """The token ids of a prompt, which must be a single one. The options are those of `rows_of`."""
    rows = rows_of(prompt, tokenizer, vocab_size, name=f"the {name}", **options)
    if not is_single(prompt):
        raise ValueError(
            f"the {name} has {counted(len(rows), 'row')}: expected one prompt per request, without a batch axis"
        )
    return rows[0]

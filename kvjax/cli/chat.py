"""`kvjax chat`: a dialogue in the terminal, whose cache stays as large as the policy allows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import kvjax_command
from kvjax.cli.console import dialogue, note
from kvjax.cli.loading import load, warn_of_unknown
from kvjax.cli.options import (
    ChatTemplate,
    CheckpointSampler,
    Dtype,
    Gates,
    Mesh,
    Model,
    NewTokens,
    PolicyText,
    Seed,
    TemplateOptions,
    template_options,
)
from kvjax.cli.progress import print_pieces

if TYPE_CHECKING:
    from kvjax import Stream
    from kvjax.kv_cache import KVCache
    from kvjax.policy import Policy
    from kvjax.reading.room import Compress
    from kvjax.stream import Piece

END = "/exit"
SAMPLER = "temperature=0.7,top_p=0.95"  # of a checkpoint that states none


def chat(
    model: Model,
    policy: PolicyText = "morphkv:budget=1024",
    system: Annotated[str | None, typer.Option(help="A system message before the first message.")] = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: TemplateOptions = None,
    max_new_tokens: NewTokens = 1024,
    sampler: CheckpointSampler = None,
    seed: Seed = 0,
    mesh: Mesh = "1x1",
    dtype: Dtype = None,
    gates: Gates = None,
) -> None:
    """Talk to a model. Each line is a message. Ctrl-C ends an answer; /exit or the end of the input, the dialogue."""
    import kvjax
    from kvjax.decoding import sampling

    chosen = kvjax.policies.parse(policy)
    sampling.parse(sampler or SAMPLER)  # before the model is loaded
    compress, template = _compress(policy, chosen), template_options(chat_template_kwargs)
    params, tokenizer = load(model, dtype, mesh, gates, chat_template=chat_template)
    method = sampling.parse(sampler or params.card.sampler or SAMPLER)
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError(
            f"{model} has no chat template: expected a checkpoint of a model that chats, or --chat-template FILE"
        )
    with Interrupts() as interrupts:
        cache: KVCache | None = None
        for turn, text in enumerate(_messages(interrupts)):
            warn_of_unknown(text if turn or system is None else f"{system} {text}", model, tokenizer)
            stream = kvjax.stream(
                params,
                dialogue(text, system if cache is None else None),
                policy=chosen,
                cache=cache,
                compress=compress,
                max_new_tokens=max_new_tokens,
                sampler=method,
                seed=seed + turn,
                tokenizer=tokenizer,
                chat_template_kwargs=template,
            )
            print_pieces(interrupts.pieces(stream))
            cache = stream.cache
            assert cache is not None
            note(cache.in_words())


def _compress(text: str, policy: Policy) -> Compress:
    """Returns when to compress, so that every message is compressed.

    Raises:
        ValueError: the policy compresses the first message only. All others would be added to it.
    """
    from kvjax.reading.room import only_once

    if policy.every is not None:  # later messages evict too, where a budget was allocated by the shares of the first
        return "auto"
    if (reason := only_once(policy)) is not None:
        raise ValueError(
            f"--policy {text}: compressing the second message {reason}; expected a policy that evicts while decoding, "
            "such as morphkv, h2o or d2o, or one that can compress a cache again, such as snapkv or pyramidkv"
        )
    return "end"


def _messages(interrupts: Interrupts) -> Iterator[str]:
    """The lines of the standard input that are not empty, up to its end or `/exit`. A terminal shows a prompt."""
    asks = sys.stdin.isatty()
    if asks:
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  arrows and the history of `input`
    while True:
        try:
            with interrupts.asking() if asks else nullcontext():
                text = input("> " if asks else "").strip()
        except EOFError:
            if asks:
                sys.stdout.write("\n")
            return
        if text == END:
            return
        if text:
            yield text


class Interrupts:
    """The handling of SIGINT: it ends an answer. At all other moments it ends the process, as in every command."""

    def __init__(self) -> None:
        self._moment: Literal["other", "answering", "ending"] = "other"
        self._terminal: Any = None  # as it is before readline changes it

    def __enter__(self) -> Interrupts:
        kvjax_command.takers.append(self._take)
        return self

    def __exit__(self, *_: object) -> None:
        kvjax_command.takers.remove(self._take)

    def _take(self) -> bool:
        """Returns whether the process goes on. It runs in another thread than the dialogue, which may be compiling."""
        if self._moment == "answering":
            self._moment = "ending"
            return True
        if self._terminal is not None:
            import termios

            termios.tcsetattr(sys.stdin, termios.TCSANOW, self._terminal)
        return False

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Within it, readline may change the terminal: SIGINT leaves it as it was."""
        try:
            import termios
        except ImportError:  # Windows
            yield
            return
        self._terminal = termios.tcgetattr(sys.stdin)
        try:
            yield
        finally:
            self._terminal = None

    def pieces(self, stream: Stream) -> Iterator[Piece]:
        """The pieces of an answer. SIGINT closes the stream after the next one; a second one ends the process."""
        self._moment = "answering"
        try:
            for piece in stream:
                yield piece
                if self._moment == "ending":
                    stream.close()
                    return
        finally:
            self._moment = "other"

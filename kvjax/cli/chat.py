"""`kvjax chat`: a dialogue in the terminal, whose cache stays as large as the policy allows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.cli.console import bytes_text, note, working
from kvjax.cli.options import Dtype, Gates, Mesh, Model
from kvjax.runtime.compiled import keep_compiled

if TYPE_CHECKING:
    from kvjax.kv_cache import KVCache
    from kvjax.policy import Policy
    from kvjax.reading.room import Compress

END = "/exit"


def chat(
    model: Model,
    policy: Annotated[
        str, typer.Option(help="What the cache retains: PRESET or PRESET:OPTION=VALUE,...")
    ] = "morphkv:budget=1024",
    system: Annotated[str | None, typer.Option(help="A system message before the first message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens that an answer may have.")] = 1024,
    sampler: Annotated[
        str, typer.Option(help="greedy, or settings as in temperature=0.7,top_p=0.9.")
    ] = "temperature=0.7,top_p=0.95",
    seed: Annotated[int, typer.Option(help="The seed of the draws.")] = 0,
    mesh: Mesh = "1x1",
    dtype: Dtype = None,
    gates: Gates = None,
) -> None:
    """Talk to a model. Each line of the input is a message; /exit or the end of the input ends the dialogue."""
    import kvjax
    from kvjax.checkpoint import load_named, mesh_sizes
    from kvjax.decoding import sampling

    chosen, method = kvjax.policies.parse(policy), sampling.parse(sampler)
    compress = _compress(policy, chosen)
    keep_compiled()
    with working(f"loading {model}"):
        params, tokenizer = load_named(model, dtype, mesh_sizes(mesh), gates or ())
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError(f"{model} has no chat template: expected a checkpoint of a model that chats")
    cache: KVCache | None = None
    token_bytes = params.config.bytes_per_token(params.embed.dtype)
    for turn, text in enumerate(_messages()):
        messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
        if turn == 0 and system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        stream = kvjax.stream(
            params,
            messages,
            policy=chosen,
            cache=cache,
            compress=compress,
            max_new_tokens=max_new_tokens,
            sampler=method,
            seed=seed + turn,
            tokenizer=tokenizer,
        )
        for piece in stream:
            assert piece.text is not None
            sys.stdout.write(piece.text[0])
            sys.stdout.flush()
        sys.stdout.write("\n")
        cache = stream.cache
        assert cache is not None
        seen = int(cache.length[0])
        note(
            f"{seen:,} tokens seen; the cache takes {bytes_text(cache.nbytes)}, "
            f"and all tokens would take {bytes_text(seen * token_bytes)}"
        )


def _compress(text: str, policy: Policy) -> Compress:
    """When to compress, so that every message is compressed.

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


def _messages() -> Iterator[str]:
    """The lines of the standard input that are not empty, up to its end or `/exit`. A terminal shows a prompt."""
    asks = sys.stdin.isatty()
    while True:
        try:
            text = input("> " if asks else "").strip()
        except EOFError:
            return
        if text == END:
            return
        if text:
            yield text

"""`kvjax generate`: answers one prompt."""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.checks import shown
from kvjax.cli.console import (
    bytes_text,
    note,
    print_json,
    prompt_text,
    working,
)
from kvjax.cli.options import Dtype, Gates, Mesh, Model
from kvjax.runtime.compiled import keep_compiled

if TYPE_CHECKING:
    from kvjax import Generation
    from kvjax.request.prompts import Prompt


def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a file instead; - is standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat the prompt as a user's message to the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="A system message before the user's message, with --chat.")] = None,
    policy: Annotated[str, typer.Option(help="What the cache retains: PRESET or PRESET:OPTION=VALUE,...")] = "full",
    max_new_tokens: Annotated[int, typer.Option(help="The most tokens that the answer may have.")] = 128,
    sampler: Annotated[str, typer.Option(help="greedy, or settings as in temperature=0.7,top_p=0.9.")] = "greedy",
    seed: Annotated[int, typer.Option(help="The seed of the draws.")] = 0,
    chunk: Annotated[
        int | None, typer.Option(help="The number of prompt tokens to read at a time, to use less memory.")
    ] = None,
    mesh: Mesh = "1x1",
    dtype: Dtype = None,
    gates: Gates = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it is decoded.")] = False,
) -> None:
    """Continue a prompt under a cache policy, e.g. --policy morphkv:budget=512,window=32."""
    import kvjax
    from kvjax.checkpoint import load_named, mesh_sizes
    from kvjax.decoding import sampling

    if as_json and stream:
        raise ValueError("--json with --stream: expected one of them, because --json prints one document at the end")
    if system is not None and not chat:
        raise ValueError(
            f"--system {shown(system)} without --chat: expected both, because a system message needs a chat"
        )
    text: Prompt = prompt_text(prompt, prompt_file, "PROMPT")
    if chat:
        messages = [{"role": "user", "content": text}]
        text = messages if system is None else [{"role": "system", "content": system}, *messages]
    chosen, method = kvjax.policies.parse(policy), sampling.parse(sampler)
    keep_compiled()
    with working(f"loading {model}", quiet=as_json):
        params, tokenizer = load_named(model, dtype, mesh_sizes(mesh), gates or ())
    options: dict[str, Any] = {
        "policy": chosen,
        "max_new_tokens": max_new_tokens,
        "sampler": method,
        "seed": seed,
        "tokenizer": tokenizer,
        "chunk": chunk,
    }
    if stream:
        for piece in kvjax.stream(params, text, **options):
            assert piece.text is not None
            sys.stdout.write(piece.text[0])
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    with working("compiling, reading and decoding", quiet=as_json):
        out = kvjax.generate(params, text, **options)
    if as_json:
        print_json(_document(out, model, policy, sampler, seed))
        return
    sys.stdout.write(f"{out.text}\n")
    stats = out.stats
    slots = math.ceil(statistics.fmean(out.cache.entries.mean_slots))
    note(
        f"{stats.prompt_tokens:,} tokens read in {stats.prefill_seconds:.2g} s, {out.lengths[0]:,} generated at "
        f"{stats.decode_tokens_per_second:.3g} tokens/s, after {stats.compile_seconds:.2g} s of compiling; the cache "
        f"is allocated for {slots:,} entries per head in {bytes_text(stats.cache_bytes)}; all "
        f"{int(out.cache.length[0]):,} tokens take {bytes_text(stats.full_cache_bytes)} uncompressed"
    )


def _document(out: Generation, model: str, policy: str, sampler: str, seed: int) -> dict[str, Any]:
    stats = out.stats
    return {
        "model": model,
        "policy": policy,
        "sampler": sampler,
        "seed": seed,
        "text": out.text,
        "tokens": out.tokens[0, : out.lengths[0]].tolist(),
        "prompt_tokens": stats.prompt_tokens,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "compile_seconds": stats.compile_seconds,
        "decode_tokens_per_second": stats.decode_tokens_per_second,
        "cache_bytes": stats.cache_bytes,
        "full_cache_bytes": stats.full_cache_bytes,
        "compression_ratio": stats.compression_ratio,
    }

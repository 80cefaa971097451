"""`kvjax generate`: answers one prompt."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvjax.checks import shown
from kvjax.cli.console import dialogue, note, print_json, prompt_text
from kvjax.cli.loading import load, warn_of_unknown
from kvjax.cli.options import (
    AsJson,
    ChatTemplate,
    CheckpointSampler,
    Chunk,
    Dtype,
    Gates,
    Mesh,
    Model,
    NewTokens,
    PolicyText,
    PromptFile,
    Seed,
    TemplateOptions,
    template_options,
)
from kvjax.cli.progress import Line, print_pieces

if TYPE_CHECKING:
    from kvjax import Generation


def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The text to continue.")] = None,
    prompt_file: PromptFile = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat the prompt as a user's message to the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="A system message before the user's message, with --chat.")] = None,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: TemplateOptions = None,
    policy: PolicyText = "full",
    max_new_tokens: NewTokens = 128,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    sampler: CheckpointSampler = None,
    seed: Seed = 0,
    chunk: Chunk = None,
    mesh: Mesh = "1x1",
    dtype: Dtype = None,
    gates: Gates = None,
    as_json: AsJson = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer as it is decoded.")] = False,
) -> None:
    """Continue a prompt under a cache policy, e.g. --policy morphkv:budget=512,window=32."""
    import kvjax
    from kvjax.decoding import sampling

    if as_json and stream:
        raise ValueError("--json with --stream: expected one of them, because --json prints one document at the end")
    if system is not None and not chat:
        raise ValueError(
            f"--system {shown(system)} without --chat: expected both, because a system message needs a chat"
        )
    if chat_template is not None and not chat:
        raise ValueError("--chat-template without --chat: expected both, because text has no template")
    if chat_template_kwargs is not None and not chat:
        raise ValueError("--chat-template-kwargs without --chat: expected both, because text has no template")
    template = template_options(chat_template_kwargs)
    question = prompt_text(prompt, prompt_file, "PROMPT")
    text: Any = dialogue(question, system) if chat else question
    chosen = kvjax.policies.parse(policy)
    sampling.parse(sampler or "greedy")  # before the model is loaded
    params, tokenizer = load(model, dtype, mesh, gates, chat_template=chat_template)
    warn_of_unknown(question if system is None else f"{system} {question}", model, tokenizer)
    sampler = sampler or params.card.sampler or "greedy"
    options: dict[str, Any] = {
        "policy": chosen,
        "max_new_tokens": max_new_tokens,
        "sampler": sampling.parse(sampler),
        "seed": seed,
        "tokenizer": tokenizer,
        "chunk": chunk,
        "stop": stop or (),
        "chat_template_kwargs": template,
    }
    if stream:
        print_pieces(kvjax.stream(params, text, **options))
        return
    with Line("generating", closely=not as_json):  # whose speed is that of one call
        out = kvjax.generate(params, text, **options)
    if as_json:
        print_json(_document(out, model, policy, sampler, seed))
        return
    sys.stdout.write(f"{out.text}\n")
    stats = out.stats
    speed = f" at {stats.decode_tokens_per_second:.3g} tokens/s" if stats.decoded_tokens else ""
    note(
        f"{stats.prompt_tokens:,} tokens read in {stats.prefill_seconds:.2g} s, {out.lengths[0]:,} generated{speed}, "
        f"after {stats.compile_seconds:.2g} s of compiling; {out.cache.in_words()}"
    )


def _document(out: Generation, model: str, policy: str, sampler: str, seed: int) -> dict[str, Any]:
    return {
        "model": model,
        "policy": policy,
        "sampler": sampler,
        "seed": seed,
        "text": out.text,
        "tokens": out.tokens[0, : out.lengths[0]].tolist(),
        **asdict(out.stats),
        "decode_tokens_per_second": out.stats.decode_tokens_per_second if out.stats.decoded_tokens else None,
        "compression_ratio": out.stats.compression_ratio,
    }

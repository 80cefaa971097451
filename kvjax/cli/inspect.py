"""`kvjax inspect`: writes a page that shows which entries each head retains, and when it evicts the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli.console import note, print_json, prompt_text
from kvjax.cli.loading import load, warn_of_unknown
from kvjax.cli.options import (
    AsJson,
    Chunk,
    Dtype,
    Gates,
    Mesh,
    NewTokens,
    PolicyText,
    PromptFile,
    Sampler,
    Seed,
    as_model,
)
from kvjax.cli.progress import Line

TASK, LENGTH, SEED = "needles", 512, 1  # the default prompt asks for two facts; the model forgets one


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(
            callback=as_model,
            metavar="MODEL",
            help="Checkpoint folder, GGUF file, or repository on the hub. Default: the model that ships with kvjax.",
        ),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The prompt. Default, without MODEL: a text and a question about it.")
    ] = None,
    prompt_file: PromptFile = None,
    policy: PolicyText = "morphkv:budget=128",
    max_new_tokens: NewTokens = 32,
    sampler: Sampler = "greedy",
    seed: Seed = 0,
    chunk: Chunk = None,
    mesh: Mesh = "1x1",
    dtype: Dtype = None,
    gates: Gates = None,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("inspect.html"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page with the entries that every head retains of a prompt and evicts during the answer."""
    import numpy as np

    from kvjax import policies
    from kvjax.checkpoint.folder import DEMO
    from kvjax.decoding import sampling
    from kvjax.evaluation.tasks import demo
    from kvjax.files.writing import check_file, write_file
    from kvjax.inspection import page, record
    from kvjax.inspection.recording import ABSENT
    from kvjax.request.prompts import Prompt

    text: Prompt
    if model is None and prompt is None and prompt_file is None:
        text = demo.example(TASK, LENGTH, np.random.default_rng(SEED)).prompt
    else:
        text = prompt_text(prompt, prompt_file, "--prompt")
    chosen, method = policies.parse(policy), sampling.parse(sampler)
    check_file(out, overwrite, "--overwrite")
    params, tokenizer = load(str(DEMO) if model is None else model, dtype, mesh, gates)
    if isinstance(text, str):
        warn_of_unknown(text, model or "demo", tokenizer)
    with Line("recording", closely=True):
        recording = record(
            params,
            text,
            policy=chosen,
            max_new_tokens=max_new_tokens,
            sampler=method,
            seed=seed,
            tokenizer=tokenizer,
            chunk=chunk,
            name=policy,
            model=model or "demo",
        )
        write_file(out, page(recording))
    if as_json:
        kept = (recording.left == recording.steps + 1).sum(axis=2)  # of each layer and head
        there = recording.left[..., 0] != ABSENT
        print_json(
            {
                "model": recording.model,
                "policy": policy,
                "page": str(out),
                "prompt_tokens": recording.prompt,
                "generated_tokens": len(recording.tokens) - recording.prompt,
                "retained": [own[has].tolist() for own, has in zip(kept, there, strict=True)],
            }
        )
        return
    note(
        f"{recording.prompt:,} prompt tokens, {len(recording.tokens) - recording.prompt:,} generated tokens; open "
        f"{out} in a browser"
    )

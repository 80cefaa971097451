"""`kvjax inspect`: a page that shows what each head keeps of one prompt, and when it lets go of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvjax.cli.console import keep_compiled, prompt_text, stderr, working

TASK, LENGTH, SEED = "needles", 512, 1  # of the text for the model that ships: two facts, of which it forgets one


def inspect(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder with a checkpoint, or a name on the hub; without one, the model that ships."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The text. [default: of the model that ships, a text and a question about it]")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a file instead; - is standard input.")
    ] = None,
    policy: Annotated[str, typer.Option(help="What the cache keeps: PRESET or PRESET:OPTION=VALUE,...")] = (
        "morphkv:budget=128"
    ),
    new_tokens: Annotated[int, typer.Option(help="At most so many tokens.")] = 32,
    sampler: Annotated[str, typer.Option(help="greedy, or settings as in temperature=0.7,top_p=0.9.")] = "greedy",
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    chunk: Annotated[int | None, typer.Option(help="Read the prompt so many tokens at a time, in less memory.")] = None,
    mesh: Annotated[
        str, typer.Option(metavar="DATAxMODEL", help="Spread the model over devices, such as 1x4 for four.")
    ] = "1x1",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; by default what the weights are stored in.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("inspect.html"),
) -> None:
    """Show in a page of HTML what every layer and head keeps of a prompt, and evicts while it is answered."""
    import numpy as np

    from kvjax import policies, sampling
    from kvjax.checkpoint import load_named, mesh_sizes
    from kvjax.evaluation.model import DEMO
    from kvjax.evaluation.tasks import demo
    from kvjax.inspection import page, record
    from kvjax.prompts import Prompt

    text: Prompt
    if model is None and prompt is None and prompt_file is None:
        text = demo.example(TASK, LENGTH, np.random.default_rng(SEED)).prompt
    else:
        text = prompt_text(prompt, prompt_file, "--prompt")
    chosen, method = policies.parse(policy), sampling.parse(sampler)
    if not out.parent.is_dir():
        raise ValueError(f"{out} cannot be written, because {out.parent} is no folder; accepted is a file in one")
    keep_compiled()
    source = str(DEMO) if model is None else model
    with working(f"loading {source}"):
        params, tokenizer = load_named(source, dtype, mesh_sizes(mesh))
    with working("compiling, reading and writing"):
        recording = record(
            params,
            text,
            policy=chosen,
            max_new_tokens=new_tokens,
            sampler=method,
            seed=seed,
            tokenizer=tokenizer,
            chunk=chunk,
            name=policy,
        )
        out.write_text(page(recording), encoding="utf-8")
    stderr().print(
        f"[dim]{recording.prompt:,} tokens read, {len(recording.tokens) - recording.prompt:,} written; {out} opens in "
        "any browser[/dim]",
        soft_wrap=True,
    )

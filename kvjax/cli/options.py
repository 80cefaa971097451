"""Arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Model: TypeAlias = Annotated[
    str,
    typer.Argument(
        help="Checkpoint folder, GGUF file, repository on the hub, or demo: the model that ships with kvjax."
    ),
]
PolicyText: TypeAlias = Annotated[str, typer.Option(help="What the cache retains: PRESET or PRESET:OPTION=VALUE,...")]
NewTokens: TypeAlias = Annotated[int, typer.Option(help="The most tokens that an answer may have.")]
Sampler: TypeAlias = Annotated[str, typer.Option(help="greedy, or settings as in temperature=0.7,top_p=0.9.")]
CheckpointSampler: TypeAlias = Annotated[
    str | None,
    typer.Option(help="greedy, or settings as in temperature=0.7,top_p=0.9; the default is the checkpoint's."),
]
Seed: TypeAlias = Annotated[int, typer.Option(help="The seed of the draws.")]
PromptFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="Read the prompt from a file instead; - is standard input.")
]
Chunk: TypeAlias = Annotated[
    int | None, typer.Option(help="The number of prompt tokens to read at a time, to use less memory.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Gates: TypeAlias = Annotated[
    list[str] | None, typer.Option(help="Folder or file of gates or statistics for the policy; may be repeated.")
]
Mesh: TypeAlias = Annotated[
    str, typer.Option(metavar="DATAxMODEL", help="Spread the model over devices, such as 1x4 for four.")
]
Dtype: TypeAlias = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; the default is the dtype of the stored weights.")
]
Data: TypeAlias = Annotated[Path, typer.Option(help="A text file, or a folder with files *.txt.")]
Batches: TypeAlias = Annotated[int, typer.Option(help="The number of batches.")]
Batch: TypeAlias = Annotated[int, typer.Option(help="The number of texts per batch.")]
Length: TypeAlias = Annotated[int, typer.Option(help="The number of tokens per text.")]

"""Arguments that several commands have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from kvjax.checks import checked_size, shown


def as_size(option: typer.CallbackParam, value: int | None) -> int | None:
    """The value of an option that is a size, if it is given. Raises ValueError, before a command begins."""
    return None if value is None else checked_size(str(option.name), value)


def as_bytes(option: typer.CallbackParam, value: str | None) -> str | None:
    """The value of an option that is a number of bytes, as text. Raises ValueError, before a command begins."""
    from kvjax.engine.memory import bytes_of

    if value is not None:
        bytes_of(value, str(option.name))
    return value


def as_model(value: str | None) -> str | None:
    """The value of MODEL. Raises ValueError for the text of a policy, such as snapkv, before a hub is asked for it."""
    if value is None or "/" in value or value == "demo" or Path(value).exists():
        return value
    from kvjax.policies import PRESETS

    if value.partition(":")[0] in PRESETS:
        raise ValueError(f"MODEL is {shown(value)}, a policy: expected a model, and the policy as --policy {value}")
    return value


def as_required_model(value: str | None) -> str | None:
    """The value of MODEL, as `as_model`. Raises ValueError for none, of which older versions of typer do not tell."""
    if value is None:
        raise ValueError("Missing argument 'MODEL'")
    return as_model(value)


Model: TypeAlias = Annotated[
    str,
    typer.Argument(
        callback=as_required_model,
        metavar="MODEL",
        help="Checkpoint folder, GGUF file, repository on the hub, or demo: the model that ships with kvjax.",
    ),
]
PolicyText: TypeAlias = Annotated[str, typer.Option(help="What the cache retains: PRESET or PRESET:OPTION=VALUE,...")]
NewTokens: TypeAlias = Annotated[int, typer.Option(callback=as_size, help="The most tokens that an answer may have.")]
Sampler: TypeAlias = Annotated[str, typer.Option(help="greedy, or settings as in temperature=0.7,top_p=0.9.")]
CheckpointSampler: TypeAlias = Annotated[
    str | None,
    typer.Option(help="greedy, or settings as in temperature=0.7,top_p=0.9; the default is the checkpoint's."),
]
Seed: TypeAlias = Annotated[int, typer.Option(help="The seed of the draws.")]
PromptFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="Read the prompt from a file instead; - is standard input.")
]
TemplateOptions: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help='Options of the chat template, such as {"enable_thinking": false}.',
    ),
]
ChatTemplate: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A Jinja file, instead of the checkpoint's chat template."),
]
Chunk: TypeAlias = Annotated[
    int | None,
    typer.Option(callback=as_size, help="The number of prompt tokens to read at a time, to use less memory."),
]
Scorer: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="Marks answers to files of questions: exact, contains, f1, rouge or module:function. Default: f1."
    ),
]
Position: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="after|before|both",
        help="Ask after the text is compressed, or before, so that policies see the question.",
    ),
]
Chat: TypeAlias = Annotated[bool, typer.Option("--chat", help="Write prompts in the model's chat template.")]
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
Batches: TypeAlias = Annotated[int, typer.Option(callback=as_size, help="The number of batches.")]
Batch: TypeAlias = Annotated[int, typer.Option(callback=as_size, help="The number of texts per batch.")]
Length: TypeAlias = Annotated[int, typer.Option(callback=as_size, help="The number of tokens per text.")]


def template_options(text: str | None) -> dict[str, Any] | None:
    """The options of a chat template. Raises ValueError for what is no JSON object."""
    if text is None:
        return None
    try:
        options = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--chat-template-kwargs {shown(text)} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"--chat-template-kwargs {shown(text)}: expected a JSON object of the template's options")
    return options

"""Finds or downloads a checkpoint, tells its form, and reads the config of a folder. It reads no weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.checkpoint.errors import CheckpointError, one_line
from kvjax.checks import did_you_mean, dtype_of, path_of
from kvjax.files.writing import finish
from kvjax.models import DecoderConfig, config_from_hf, text_config
from kvjax.runtime.progress import Doing, Report, reporter

WEIGHTS, INDEX, PARAMS = "model.safetensors", "model.safetensors.index.json", "params"
SHARD = re.compile(r"model(\.safetensors)?-\d+-of-\d+\.safetensors")  # in the forms of published checkpoints
GENERATION = "generation_config.json"
ORBAX = (  # what Orbax writes into the folder of a pytree
    r"(_METADATA|_CHECKPOINT_METADATA|_sharding|commit_success\.txt|array_metadatas/process_\d+"
    r"|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/[0-9a-f]{32}))"
)
OWNED = re.compile(rf"(generation_)?config\.json|model\.safetensors(\.index\.json)?|{SHARD.pattern}|{PARAMS}/{ORBAX}")
TOKENIZER = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|tekken)\.json|(tokenizer|tiktoken)\.model"
    r"|(merges|vocab)\.txt|chat_template\.(jinja|json)|additional_chat_templates/[^/]+\.jinja"
)
DOWNLOADED = (
    "config.json",
    GENERATION,
    "model*.safetensors",
    INDEX,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
)
POINTER = b"version https://git-lfs.github.com/spec/"  # the first bytes of what Git LFS puts in place of a file
SECOND = "Downloading bytes"  # the hub's second bar for the same bytes, before they are unpacked
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {"F32": jnp.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": jnp.dtype("float16")}
DTYPE_NAMES = ", ".join(map(str, DTYPES.values()))
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
MODEL = "a folder with config.json and the weights, a GGUF file, demo, or a repository on the Hugging Face hub"
BESIDE = "a folder or a file of gates or statistics, or a repository on the Hugging Face hub"
DEMO = Path(__file__).parents[1] / "demo_model"  # the model that ships with kvjax

Form = Literal["hf", "gguf", "orbax", "cache"]
CONTENTS: dict[Form, str] = {  # what a form holds, and which function reads it
    "hf": "weights in Hugging Face form, which kvjax.load reads",
    "gguf": "weights in GGUF, which kvjax.load reads",
    "orbax": "weights that kvjax.save wrote, which kvjax.restore reads",
    "cache": "a cache, which kvjax.restore_cache reads",
}


def locate(path_or_hub_id: str | os.PathLike[str], patterns: Sequence[str] = DOWNLOADED, expected: str = MODEL) -> Path:
    """Returns the folder or GGUF file of a checkpoint, or downloads a folder from the Hugging Face hub.

    Args:
        path_or_hub_id: an existing folder or GGUF file, or else "demo", the model that ships with kvjax, or a hub id.
        patterns: the glob patterns of the files to download.
        expected: what an error says is accepted.

    Raises:
        CheckpointError: it is another file, or neither a path nor a repository that the hub provides, or its writing
            was interrupted and cannot be finished.
    """
    folder = path_of("path_or_hub_id", path_or_hub_id)
    if folder.is_dir():
        finish_writing(folder)
        return folder
    if folder.exists():
        if form_of(folder) is None:
            raise CheckpointError(folder, [f"it is a file in another form: expected {expected}"])
        return folder
    if path_or_hub_id == "demo":
        return DEMO
    if not isinstance(path_or_hub_id, str) or not HUB_ID.fullmatch(path_or_hub_id):
        raise CheckpointError(folder, [f"no such folder{_near(folder)}: expected {expected}"])

    try:
        return download(path_or_hub_id, patterns)
    except (OSError, ValueError) as error:  # not found, gated, offline, not a legal id
        reason = f"no such folder{_near(folder)}: expected {expected}, which did not provide it: {one_line(error)}"
        raise CheckpointError(path_or_hub_id, [reason]) from error


def download(name: str, patterns: Sequence[str]) -> Path:
    """Returns the folder of a repository on the hub, with the files that match the patterns.

    Raises what the hub's client raises: an OSError or a ValueError.
    """
    from huggingface_hub import snapshot_download

    report = reporter()
    bars: Any = {} if report is None else {"tqdm_class": _bars(report)}
    return Path(snapshot_download(name, allow_patterns=list(patterns), **bars))


def _bars(report: Report) -> type:
    """The class of bars that the hub's client counts bytes with, in threads of its own. They draw nothing."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts = options.get("unit") == "B" and options.get("desc") != SECOND
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.counts and self.total:
                report(Doing("downloading", int(self.n), int(self.total), "bytes"))

    return Bar


def _near(path: Path) -> str:
    """The names beside a path that does not exist that may be meant."""
    try:
        beside = [str(path.with_name(other.name)) for other in path.parent.iterdir()]
    except OSError:
        beside = []
    near = did_you_mean(path, ["demo", *beside]).removeprefix("; ")
    return f" ({near})" if near else ""


def form_of(folder: Path) -> Form | None:
    """Returns the form of a path's content: Hugging Face weights, a GGUF file, Orbax weights, a saved cache, or None.

    Raises:
        CheckpointError: the folder's writing was interrupted and cannot be finished.
    """
    if folder.is_file():
        with folder.open("rb") as file:
            return "gguf" if folder.suffix == ".gguf" or file.read(4) == b"GGUF" else None
    finish_writing(folder)
    if (folder / WEIGHTS).exists() or (folder / INDEX).exists():
        return "hf"
    if (folder / PARAMS).is_dir():
        return "orbax"
    return "cache" if (folder / "facts").is_dir() else None


def finish_writing(folder: Path) -> None:
    """Puts a checkpoint in place whose writing was interrupted when it was whole. Raises CheckpointError."""
    try:
        finish(folder)
    except OSError as error:
        reason = f"its writing was interrupted and cannot be finished: {one_line(error)}"
        raise CheckpointError(folder, [reason]) from error


def check_form(folder: Path, *wanted: Form) -> Form | None:
    """Returns the form of a path. Raises CheckpointError for another form; it names the function that reads that."""
    form = form_of(folder)
    if form is not None and form not in wanted:
        raise CheckpointError(folder, [f"it holds {CONTENTS[form]}"])
    return form


def read_config(folder: Path) -> DecoderConfig:
    """Reads config.json.

    Raises:
        CheckpointError: there is no config.json, or it is not a JSON object. A saved cache is named as such.
        UnsupportedModelError: config.json asks for a computation that is not implemented.
    """
    if not (folder / "config.json").is_file():
        check_form(folder, "hf", "gguf", "orbax")
        adapter = (folder / "adapter_config.json").is_file()  # as peft writes it
        hint = ", but an adapter: expected a model into which the adapter is merged" if adapter else ""
        raise CheckpointError(folder, [f"it has no config.json{hint}"])
    return config_from_hf(read_json(folder / "config.json"))


def read_text_config(folder: Path) -> dict[str, Any]:
    """Reads the part of config.json that is about the text decoder. Raises CheckpointError, UnsupportedModelError."""
    return text_config(read_json(folder / "config.json"))


def read_json(file: Path) -> dict[str, Any]:
    """Reads a file with one JSON object. Raises CheckpointError."""
    try:
        content = json.loads(file.read_text("utf-8-sig"))  # some editors write a byte-order mark
    except ValueError as error:
        raise CheckpointError(file.parent, [f"{file.name} is not valid JSON: {error}"]) from error
    if not isinstance(content, dict):
        raise CheckpointError(file.parent, [f"{file.name} is not a JSON object"])
    return content


def unfetched(file: Path) -> str:
    """Says that a file is a pointer of Git LFS, as a clone without it has; empty for any other file."""
    with file.open("rb") as content:
        pointer = content.read(len(POINTER)) == POINTER
    return (
        f"{file.name} is a pointer of Git LFS, not the file: expected its content, which git lfs pull fetches" * pointer
    )


def owned(tokenizer: bool) -> re.Pattern[str]:
    """Returns a pattern of the files that a checkpoint owns: those that writing it may replace and remove.

    Args:
        tokenizer: whether the tokenizer's files are among them.
    """
    return re.compile("|".join([OWNED.pattern, *([TOKENIZER.pattern] if tokenizer else [])]))


def check_dtype(dtype: DTypeLike | None) -> None:
    """Raises ValueError if `dtype` is neither None nor a dtype that weights can be cast to."""
    if dtype is not None and dtype_of(dtype) not in DTYPES.values():
        raise ValueError(f"dtype {jnp.dtype(dtype).name} is not supported; accepted: {DTYPE_NAMES}")

"""Reads what commands need before they begin: a model, its headers, and texts that it is trained or measured on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvjax.checks import shown
from kvjax.cli.console import show_warning
from kvjax.cli.progress import Line
from kvjax.files.reading import read_text
from kvjax.runtime.compiled import keep_compiled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvjax.files.texts import Stream
    from kvjax.models import Card, Decoder, DecoderConfig


LONGEST_TEMPLATE = 1_000_000  # bytes
EXAMPLE = "the code of anna is lamp . the code of boris is kettle . recall what the code of anna is :"


class Stated(NamedTuple):
    """The config and card of a checkpoint, the number of parameters, their stored dtypes, and the dtype to use."""

    config: DecoderConfig
    card: Card
    parameters: int
    stored: tuple[str, ...]
    held: Any


def load(
    model: str,
    dtype: str | None,
    mesh: str,
    gates: Sequence[str] | None = None,
    *,
    chat_template: Path | None = None,
) -> tuple[Decoder, PreTrainedTokenizerBase]:
    """Loads a model and its tokenizer as `load_named` does, and keeps the programs that it will run.

    Args:
        mesh: DATAxMODEL.
        chat_template: a Jinja file, which replaces the tokenizer's chat template.

    Raises:
        ValueError: the file cannot be read, or is no template.
    """
    from kvjax.checkpoint import load_named, mesh_sizes

    template = None if chat_template is None else read_template(chat_template)
    keep_compiled()
    with Line(f"loading {model}"):
        params, tokenizer = load_named(model, dtype, mesh_sizes(mesh), gates or ())
    if template is not None:
        tokenizer.chat_template = template
    return params, tokenizer


def read_template(path: Path) -> str:
    """A chat template. Raises ValueError for a file that cannot be read, or that is no Jinja template."""
    from transformers.utils.chat_template_utils import render_jinja_template

    from kvjax.request.chat import TEMPLATE_SECONDS, time_limit

    try:
        template = read_text(path, LONGEST_TEMPLATE, "a Jinja file")
    except OSError as error:
        raise ValueError(f"--chat-template {path}: {error.strerror}; expected a Jinja file") from None
    except ValueError as error:
        raise ValueError(f"--chat-template {error}") from None
    try:
        with time_limit(TEMPLATE_SECONDS):
            texts, _ = render_jinja_template([[{"role": "user", "content": "x"}]], chat_template=template)
    except Exception as error:  # a template is a program, so any error may come out
        raise ValueError(f"--chat-template {path}: {type(error).__name__}: {error}; expected a Jinja file") from None
    if "x" not in texts[0]:
        raise ValueError(f"--chat-template {path} leaves out a user's message: expected a Jinja file that writes it")
    return template


def warn_of_unknown(text: str, model: str, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Prints a warning if tokens of a prompt are unknown to the tokenizer, which reads all of them as the same one."""
    from kvjax.evaluation.tasks.vocabulary import WORDS

    unknown = None if tokenizer is None else tokenizer.unk_token_id
    if tokenizer is None or unknown is None:
        return
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not (missing := ids.count(unknown)):
        return
    is_demo = tokenizer.get_vocab().keys() == set(WORDS)
    hint = f", which knows {len(WORDS)} words; try: {shown(EXAMPLE)}" if is_demo else ""
    show_warning(f"{missing:,} of {len(ids):,} tokens of the prompt are unknown to {model}{hint}")


def read_model(path: str, dtype: str | None) -> Stated:
    """Reads what a checkpoint states, without its weights."""
    from kvjax.checkpoint import dtype_named, locate, read_headers, source_of

    with Line(f"reading {path}"):
        source = source_of(locate(path, patterns=("config.json", "generation_config.json")))
        config = source.config()
        headers = read_headers(source)
    return Stated(config, source.card(), headers.parameters, headers.stored, dtype_named(dtype) or headers.dtype)


def load_with_texts(
    model: str, dtype: str | None, mesh: str, data: Path, length: int
) -> tuple[Decoder, PreTrainedTokenizerBase, Stream]:
    """Loads a model, its tokenizer, and texts for windows of `length` tokens.

    Raises ValueError if one of them cannot be read, the texts are shorter, or the model has fewer positions. Weights
    are read last.
    """
    from kvjax.checkpoint import dtype_named, locate, mesh_sizes, source_of
    from kvjax.checkpoint.named import needed_tokenizer
    from kvjax.files.texts import read_stream, text_files

    text_files(data)  # before a model is downloaded
    dtype_named(dtype)
    mesh_sizes(mesh)
    source = source_of(locate(model))
    if length > (most := source.config().max_positions):
        raise ValueError(f"length={length}: expected at most {most}, the model's positions")
    with Line("reading texts"):
        stream = read_stream(data, needed_tokenizer(source, model), least=length)
    return *load(model, dtype, mesh), stream

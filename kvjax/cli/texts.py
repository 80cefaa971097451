"""The start of commands that measure or train a model on texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cli.console import working

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvjax.files.texts import Stream
    from kvjax.models import Decoder


def load_with_texts(
    model: str, dtype: str | None, mesh: str, data: Path, length: int
) -> tuple[Decoder, PreTrainedTokenizerBase, Stream]:
    """Loads a model, its tokenizer, and texts for windows of `length` tokens.

    Raises ValueError if one of them cannot be read, the texts are shorter, or the model has fewer positions.
    """
    from kvjax.checkpoint import load_named, mesh_sizes
    from kvjax.files.texts import read_stream

    with working(f"loading {model}"):
        params, tokenizer = load_named(model, dtype, mesh_sizes(mesh))
    if length > params.config.max_positions:
        raise ValueError(f"length={length}: expected at most {params.config.max_positions}, the model's positions")
    return params, tokenizer, read_stream(data, tokenizer, least=length)

"""The two sources of a checkpoint: a folder in Hugging Face form, or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvjax.checkpoint.card import read_card
from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.experts import experts_apart
from kvjax.checkpoint.folder import read_config
from kvjax.checkpoint.mxfp4 import dequantised
from kvjax.checkpoint.tensors import Stored, matrices, open_tensors
from kvjax.checkpoint.tokenizer_files import read_tokenizer
from kvjax.checks import installs
from kvjax.models import Card, DecoderConfig, Weight, family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Source(Protocol):
    """A config, a tokenizer and named tensors."""

    @property
    def path(self) -> Path:
        """The folder or file."""

    @property
    def described(self) -> str:
        """The file that describes the model, as error messages name it."""

    def config(self) -> DecoderConfig:
        """Reads the config. Raises CheckpointError and UnsupportedModelError."""

    def card(self) -> Card:
        """Reads what the checkpoint says about generation. Raises CheckpointError."""

    def weights(self, config: DecoderConfig) -> list[Weight]:
        """The parameters of a config, and the tensors of the source that hold them."""

    def tokenizer(self, problems: list[str]) -> PreTrainedTokenizerBase | None:
        """Returns the tokenizer, or None if there is none. Appends to `problems` if it is unreadable."""

    def open(self, stack: ExitStack, problems: list[str]) -> tuple[Mapping[str, Stored], set[str] | None]:
        """Opens the tensors. The arguments and the result are those of `open_tensors`."""


@dataclass(frozen=True)
class Folder:
    """A folder with config.json, a tokenizer and safetensors. In a folder without weights, `open` finds none."""

    described = "config.json"
    path: Path

    def config(self) -> DecoderConfig:
        return read_config(self.path)

    def card(self) -> Card:
        return read_card(self.path, self.config().vocab_size)

    def weights(self, config: DecoderConfig) -> list[Weight]:
        return family(config.family).weights(config)

    def tokenizer(self, problems: list[str]) -> PreTrainedTokenizerBase | None:
        return read_tokenizer(self.path, problems)

    def open(self, stack: ExitStack, problems: list[str]) -> tuple[dict[str, Stored], set[str] | None]:
        config = self.config()
        tensors, unreadable = _of_text(*open_tensors(self.path, stack, problems), config)
        embed, unembed = matrices(config, self.weights)
        if config.tie_embeddings and unembed in tensors and embed not in {*tensors, *(unreadable or ())}:
            tensors[embed] = tensors.pop(unembed)  # safetensors' save_model writes one of two equal tensors, this one
        return experts_apart(dequantised(tensors), config), unreadable


def _of_text(
    tensors: Mapping[str, Stored], unreadable: set[str] | None, config: DecoderConfig
) -> tuple[dict[str, Stored], set[str] | None]:
    """Returns the tensors of the text decoder under the names of its family, without those that it leaves unread.

    Args:
        tensors, unreadable: from `open_tensors`.
        config: of the text decoder.
    """
    text_name = getattr(family(config.family), "text_name", lambda name, config: name)
    named = {name: text_name(name, config) for name in {*tensors, *(unreadable or ())}}
    found = {own: tensor for name, tensor in tensors.items() if (own := named[name]) is not None}
    return found, None if unreadable is None else {own for name in unreadable if (own := named[name]) is not None}


def source_of(path: Path) -> Source:
    """Returns the source at a path from `locate`. Raises CheckpointError if the library to read it is missing."""
    if path.is_dir():
        return Folder(path)
    try:
        from kvjax.checkpoint.gguf import GgufFile
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        reason = f"reading GGUF needs the package gguf: expected {installs('gguf')}"
        raise CheckpointError(path, [reason]) from None
    return GgufFile(path)

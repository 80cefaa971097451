"""A GGUF file as a source of a config, a tokenizer and named tensors."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np

from kvjax.checkpoint.card import card_of
from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.gguf.config import ARCHITECTURES, FAMILIES, ROPE_TENSORS, generation, hf_config
from kvjax.checkpoint.gguf.header import Header, read_header
from kvjax.checkpoint.gguf.tensors import GgufTensor, open_places
from kvjax.checkpoint.gguf.tokenizer import build_tokenizer
from kvjax.models import Card, DecoderConfig, Weight, config_from_hf, family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NORM = re.compile(r"norm\.weight$")  # llama.cpp adds 1 to these tensors of Gemma
INTERLEAVED = ("llama", "internlm2")  # the architectures whose q and k rows are in llama.cpp's order


class GgufFile:
    """A GGUF file. It is a `kvjax.checkpoint.source.Source`."""

    described = "its metadata"

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def _header(self) -> Header:
        header = read_header(self.path)
        parts = header.metadata.get("split.count", 1)
        if parts not in (0, 1):
            reason = (
                f"it is one of {parts} files of a model; expected one file, which `llama-gguf-split --merge` writes"
            )
            raise CheckpointError(self.path, [reason])
        return header

    @cached_property
    def _config(self) -> DecoderConfig:
        shapes = {name: place.shape for name, place in self._header.places.items()}
        blocks = self._header.metadata.get(f"{self._header.metadata.get('general.architecture')}.block_count")
        if type(blocks) is int and blocks > len(shapes):  # before a decoder of that many layers is planned
            raise CheckpointError(
                self.path, [f"its metadata asks for {blocks:,} blocks; it has {len(shapes):,} tensors"]
            )
        return config_from_hf(hf_config(self._header.metadata, shapes, self._read))

    def config(self) -> DecoderConfig:
        return self._config

    def weights(self, config: DecoderConfig) -> list[Weight]:
        """The weights under the names of the file. Only Phi's tensors are fused; InternLM2's are Llama's."""
        names = gguf.get_tensor_name_map(_architecture(config), config.num_layers)

        def renamed(weight: Weight) -> Weight:
            base, _, suffix = weight.name.rpartition(".")
            return dataclasses.replace(weight, name=f"{names.get_name(base)}.{suffix}")

        fused = config.family == "phi3"
        return [renamed(weight) for weight in family("phi3" if fused else "llama").weights(config)]

    def card(self) -> Card:
        said = generation(self._header.metadata)
        text = json.dumps(said, indent=2) + "\n" if said else ""
        return card_of(self.path, said, self._config.vocab_size, generation=text)

    def tokenizer(self, problems: list[str]) -> PreTrainedTokenizerBase | None:
        tokens = self._header.metadata.get("tokenizer.ggml.tokens", ())
        if len(tokens) > self._config.vocab_size:
            problems.append(
                f"its tokenizer has {len(tokens):,} tokens; the embeddings have {self._config.vocab_size:,} rows"
            )
            return None
        return build_tokenizer(self._header.metadata, problems)

    def open(self, stack: ExitStack, problems: list[str]) -> tuple[dict[str, GgufTensor], set[str]]:
        config, heads = self._config, {}
        if self._header.metadata["general.architecture"] in INTERLEAVED:
            counts = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
            heads = {
                f"blk.{layer}.{name}.{suffix}": count
                for layer in range(config.num_layers)
                for name, count in counts.items()
                for suffix in ("weight", "bias")
            }
        tensors = open_places(self.path, self._header, heads, problems)
        unreadable = self._header.places.keys() - tensors.keys()
        if config.unit_offset_norms:
            shifted = {name: dataclasses.replace(x, added=1.0) for name, x in tensors.items() if NORM.search(name)}
            tensors |= shifted
        return {name: tensor for name, tensor in tensors.items() if name not in ROPE_TENSORS}, set(unreadable)

    def _read(self, name: str) -> np.ndarray:
        """A whole vector, such as a scaling of RoPE."""
        problems: list[str] = []
        tensors = open_places(self.path, self._header, {}, problems)
        if name not in tensors:
            raise CheckpointError(self.path, problems)
        return tensors[name][tuple(slice(0, size) for size in tensors[name].shape)]


def _architecture(config: DecoderConfig) -> gguf.MODEL_ARCH:
    own = {family: architecture for architecture, family in FAMILIES.items()}
    named = own.get(config.family, config.family if config.family in ARCHITECTURES else "llama")
    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == named)

"""Loads models from the texts that commands and evaluation grids use: a path or hub id, a dtype, a mesh."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.folder import DTYPE_NAMES, DTYPES, check_form, locate
from kvjax.checkpoint.hf import load
from kvjax.checkpoint.orbax import restore
from kvjax.checkpoint.source import Source, source_of
from kvjax.checks import did_you_mean, shown
from kvjax.gates.attach import with_gates
from kvjax.gates.files import Gates, read_gates
from kvjax.mesh.sharding import make_mesh
from kvjax.models import Decoder
from kvjax.statistics.attach import with_statistics
from kvjax.statistics.files import holds_statistics, read_statistics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_named(
    model: str, dtype: str | None = None, mesh: tuple[int, int] = (1, 1), gates: Sequence[str] = ()
) -> tuple[Decoder, PreTrainedTokenizerBase]:
    """Loads a decoder and its tokenizer, for text prompts.

    Args:
        model: a folder in Hugging Face or Orbax form, a GGUF file, "demo", or a hub id, as `load` takes it.
        dtype: the name of the dtype of the weights: float32, bfloat16 or float16. By default the stored one.
        mesh: the sizes of a mesh, (data, model); (1, 1) is the default device.
        gates: folders, files or hub ids of the gates and statistics to attach, as `kvjax.with_gates` and
            `kvjax.with_statistics` take them.

    Raises:
        CheckpointError: the checkpoint, the gates or the statistics cannot be read.
        UnsupportedModelError: the config asks for a computation that is not implemented.
        ValueError: the model has no tokenizer or does not fit the mesh, or `dtype` or `mesh` is not accepted. The two
            errors above are ValueErrors too.
    """
    devices, wanted = None if mesh == (1, 1) else make_mesh(*mesh), dtype_named(dtype)
    path = locate(model)
    form = check_form(path, "hf", "gguf", "orbax")
    tokenizer = needed_tokenizer(source_of(path), model)  # before weights are read
    beside = [read_statistics(folder) if holds_statistics(folder) else read_gates(folder) for folder in gates]
    read = restore if form == "orbax" else load
    params, _ = read(path, wanted, devices, tokenizer=None)
    for given in beside:
        params = with_gates(params, given) if isinstance(given, Gates) else with_statistics(params, given)
    return params, tokenizer


def needed_tokenizer(source: Source, model: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the source of a model. Raises CheckpointError if it cannot be read, ValueError without one."""
    problems: list[str] = []
    tokenizer = source.tokenizer(problems)
    if problems:
        raise CheckpointError(source.path, problems)
    if tokenizer is None:
        expected = "tokenizer.json, tokenizer.model or vocab.json"
        raise ValueError(f"{model} has no tokenizer, which text prompts need: expected {expected}")
    return tokenizer


def dtype_named(name: str | None) -> Any:
    """Returns the dtype with this name, or None for None.

    Raises:
        ValueError: the name is not float32, bfloat16 or float16.
    """
    if name is None:
        return None
    accepted = {str(dtype): dtype for dtype in DTYPES.values()}
    if name not in accepted:
        raise ValueError(f"dtype {shown(name)} is not supported; accepted: {DTYPE_NAMES}{did_you_mean(name, accepted)}")
    return accepted[name]


def mesh_sizes(text: str) -> tuple[int, int]:
    """Parses the sizes of a mesh, (data, model), from a text such as `2x4`.

    Raises:
        ValueError: the text is not DATAxMODEL with two integers >= 1.
    """
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if sizes is None:
        raise ValueError(f"mesh {shown(text)}: expected DATAxMODEL, two integers >= 1, such as 2x4")
    return int(sizes[1]), int(sizes[2])

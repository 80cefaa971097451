"""Loads the model that a grid names, or only its config and tokenizer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kvjax.checkpoint import CheckpointError, dtype_named, load_named, locate, read_headers, source_of
from kvjax.checkpoint.folder import DEMO, DOWNLOADED
from kvjax.evaluation.grid import Grid
from kvjax.models import Decoder, DecoderConfig


def load_model(grid: Grid) -> tuple[Decoder, Any]:
    """Loads the parameters onto the grid's mesh, and the tokenizer.

    Raises:
        ValueError: if the model cannot be loaded or has no tokenizer, if the dtype is unknown, or if the mesh does not
            fit the model.
    """
    return load_named(_path(grid), grid.dtype, grid.mesh, grid.gates)


def describe_model(grid: Grid) -> tuple[DecoderConfig, Any, Any]:
    """The config, the tokenizer and the dtype, without reading or downloading weights. Raises as `load_model` does."""
    path, dtype = _path(grid), dtype_named(grid.dtype)
    source = source_of(locate(path, [name for name in DOWNLOADED if "safetensors" not in name]))
    config = source.config()
    problems: list[str] = []
    tokenizer = source.tokenizer(problems)
    if problems:
        raise CheckpointError(path, problems)
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer: expected a checkpoint with a tokenizer")
    return config, tokenizer, dtype or jnp.result_type(*read_headers(source)[1])


def _path(grid: Grid) -> str:
    return str(DEMO) if grid.model == "demo" else grid.model

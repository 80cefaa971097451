"""The model that a grid names: loaded, or only what is known of it without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

import kvjax
from kvjax.checkpoint import DTYPES, CheckpointError, form_of, locate, read_config, read_headers
from kvjax.checkpoint.folder import DOWNLOADED, read_tokenizer
from kvjax.evaluation.grid import Grid
from kvjax.models import Decoder, DecoderConfig

DEMO = Path(kvjax.__file__).parent / "demo_model"


def load_model(grid: Grid) -> tuple[Decoder, Any]:
    """Parameters on the grid's mesh, and the tokenizer.

    Raises ValueError for a model that cannot be loaded or has no tokenizer, a dtype that there is not, or a mesh that
    does not fit.
    """
    mesh = None if grid.mesh == (1, 1) else kvjax.make_mesh(*grid.mesh)
    path, dtype = _path(grid), _dtype(grid)
    read = kvjax.restore if form_of(Path(path).expanduser()) == "orbax" else kvjax.load
    params, tokenizer = read(path, dtype, mesh)
    return params, _needed(tokenizer, grid)


def describe_model(grid: Grid) -> tuple[DecoderConfig, Any, Any]:
    """The config, the tokenizer and the dtype; no weights are read, or downloaded. Raises as `load_model`."""
    path, dtype = _path(grid), _dtype(grid)
    folder = locate(path, [name for name in DOWNLOADED if "safetensors" not in name])
    config = read_config(folder)
    problems: list[str] = []
    tokenizer = read_tokenizer(folder, problems)
    if problems:
        raise CheckpointError(path, problems)
    return config, _needed(tokenizer, grid), dtype or jnp.result_type(*read_headers(folder, config)[1])


def _path(grid: Grid) -> str:
    return str(DEMO) if grid.model == "demo" else grid.model


def _dtype(grid: Grid) -> Any:
    dtypes = {str(dtype): dtype for dtype in DTYPES.values()}
    if grid.dtype is not None and grid.dtype not in dtypes:
        raise ValueError(f"dtype {grid.dtype!r} is not supported; accepted: {', '.join(dtypes)}")
    return None if grid.dtype is None else dtypes[grid.dtype]


def _needed(tokenizer: Any, grid: Grid) -> Any:
    if tokenizer is None:
        raise ValueError(f"{grid.model} has no tokenizer, which tasks of text need")
    return tokenizer

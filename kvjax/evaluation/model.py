"""The model that a grid names, loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp

import kvjax
from kvjax.checkpoint import DTYPES, form_of
from kvjax.evaluation.grid import Grid
from kvjax.models import Decoder

DEMO = Path(kvjax.__file__).parent / "demo_model"


def load_model(grid: Grid) -> tuple[Decoder, Any]:
    """Parameters on the grid's mesh, and the tokenizer.

    Raises ValueError for a model that cannot be loaded or has no tokenizer, a dtype that there is not, or a mesh that
    does not fit.
    """
    dtypes = {str(dtype): dtype for dtype in DTYPES.values()}
    if grid.dtype is not None and grid.dtype not in dtypes:
        raise ValueError(f"dtype {grid.dtype!r} is not supported; accepted: {', '.join(dtypes)}")
    mesh = None if grid.mesh == (1, 1) else kvjax.make_mesh(*grid.mesh)
    path = DEMO if grid.model == "demo" else Path(grid.model).expanduser()
    read = kvjax.restore if form_of(path) == "orbax" else kvjax.load
    where = path if grid.model == "demo" or path.exists() else grid.model
    params, tokenizer = read(where, None if grid.dtype is None else jnp.dtype(dtypes[grid.dtype]), mesh)
    if tokenizer is None:
        raise ValueError(f"{grid.model} has no tokenizer, which tasks of text need")
    return params, tokenizer

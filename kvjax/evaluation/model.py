"""Loads the model that a grid names, or plans a run by its config and tokenizer alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvjax.checkpoint import dtype_named, load_named, locate, read_headers, source_of
from kvjax.checkpoint.folder import DEMO, DOWNLOADED
from kvjax.checkpoint.named import needed_tokenizer
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.items import Item, Refusal, read_items
from kvjax.evaluation.planning import RunPlan
from kvjax.models import Decoder, DecoderConfig


def load_model(grid: Grid) -> tuple[Decoder, Any]:
    """Loads the parameters onto the grid's mesh, and the tokenizer.

    Raises:
        ValueError: if the model cannot be loaded or has no tokenizer, if the dtype is unknown, or if the mesh does not
            fit the model.
    """
    return load_named(_path(grid), grid.dtype, grid.mesh, grid.gates)


def plan_run(grid: Grid, only: Sequence[str] | None = None) -> RunPlan:
    """The plan of a grid, without reading or downloading weights. Raises as `load_model` and `read_items` do.

    Args:
        grid: the grid.
        only: names or patterns that select some of the grid's tasks; all tasks by default.
    """
    path, dtype = _path(grid), dtype_named(grid.dtype)
    source = source_of(locate(path, [name for name in DOWNLOADED if "safetensors" not in name]))
    config, tokenizer = source.config(), needed_tokenizer(source, path)
    return plan_for(grid, tokenizer, config, dtype or read_headers(source).dtype, only)


def plan_for(
    grid: Grid, tokenizer: Any, config: DecoderConfig, dtype: Any, only: Sequence[str] | None = None
) -> RunPlan:
    """The plan of a grid for a model of a config, whose cache has a dtype. Raises as `read_items` does."""
    found = list(read_items(grid, tokenizer, config.max_positions, only))
    return RunPlan(
        grid,
        items=tuple(item for item in found if isinstance(item, Item)),
        refusals=tuple(refusal for refusal in found if isinstance(refusal, Refusal)),
        config=config,
        dtype=dtype,
    )


def _path(grid: Grid) -> str:
    return str(DEMO) if grid.model == "demo" else grid.model

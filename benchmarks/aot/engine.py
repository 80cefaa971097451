"""Compiles ahead what `kvjax.Engine` runs, for a model without weights, and for devices that need not be here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.engine.plans import Plans
from kvjax.engine.reading import Reader
from kvjax.engine.resident import compile_rows
from kvjax.engine.sizes import CHUNK, Sizes
from kvjax.engine.ticket import Options, Ticket
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import check_batch, fit_mesh
from kvjax.models import DecoderConfig
from kvjax.policy import Policy
from kvjax.policy.suits import check_attached
from kvjax.reading.replays import encoded_texts
from kvjax.runtime.modes import own_modes

from .lower import Lowered, plan_params


@own_modes()
def lower_engine(
    config: DecoderConfig,
    policy: Policy,
    *,
    mesh: Mesh,
    rows: int,
    max_prompt: int,
    max_new_tokens: int,
    dtype: Any = jnp.bfloat16,
    chunk: int = CHUNK,
) -> tuple[dict[str, jax.stages.Lowered], KVCache]:
    """The programs of an engine, for the devices of a mesh of `make_mesh`.

    Args:
        dtype: of parameters and cache.
        chunk: as `Engine` takes it.

    Returns:
        The programs by name. "admit 1" writes a request into a row, and "advance" is a step of all rows. Most others
        read prompts. And the shapes of the cache of one row.

    Raises:
        ValueError: for a mesh that does not fit the model or the rows.
    """
    params, mesh = plan_params(config, dtype, mesh), fit_mesh(mesh, config)
    check_attached(policy, params)
    check_batch(rows, mesh)
    sizes = Sizes.of(rows, max_prompt, max_new_tokens, chunk=chunk, platform=mesh.devices.flat[0].platform)
    plans = Plans.of(config, policy, sizes, jnp.dtype(dtype), mesh, encoded_texts(policy, None))
    programs = Lowered(plans.placed)
    reads = Reader(plans, params, programs.compile, plans.shapes_of).add_all(after=False)
    start = Ticket.of([0], Options(1), sizes, None, config.vocab_size).start
    compile_rows(programs, plans, params, reads, start, at_once=1)
    return programs.lowered, reads[1].cache

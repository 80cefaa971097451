"""What `generate` runs, compiled ahead: for a model without weights, and for devices that need not be here.

`.compile()` of what is lowered here needs the compiler of these devices but none of them; see `targets.py`. What comes
back says what the program takes (`memory_analysis()`), and `hlo.Loop` what a loop does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.cache import bucket, room_for
from kvjax.checkpoint.parameters import Blank
from kvjax.decoding.loop import Answers, Decoding, decode
from kvjax.decoding.sampling import Greedy, SamplingMethod
from kvjax.extend import jitted_read, read
from kvjax.kv_cache import KVCache, check_attached
from kvjax.mesh.sharding import check_batch, fit_mesh, rows_sharding
from kvjax.models import Decoder, DecoderConfig
from kvjax.plan import check_sizes, placed, plan_cache
from kvjax.policy import Policy
from kvjax.reading.prompt import read_on
from kvjax.reading.room import ending, plan_read
from kvjax.request.request import Sampling
from kvjax.runtime.modes import own_modes

Part = Literal["first", "middle", "last"]


def plan_params(config: DecoderConfig, dtype: Any, mesh: Mesh) -> Decoder:
    """A decoder whose parameters are shapes (`jax.ShapeDtypeStruct`) spread over the mesh.

    Raises ValueError if the mesh does not fit the model.
    """
    blank = Blank.of(config, mesh)
    return blank.filled(
        {
            path: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=blank.sharding(path))
            for path, shape in blank.shapes.items()
        }
    )


@own_modes()
def lower_prefill(
    config: DecoderConfig,
    policy: Policy,
    *,
    mesh: Mesh,
    batch: int,
    length: int,
    new_tokens: int,
    dtype: Any = jnp.bfloat16,
    chunk: int | None = None,
    part: Part = "last",
) -> jax.stages.Lowered:
    """What `generate` reads prompts of `length` tokens with, for the devices of a mesh of `make_mesh`.

    Where a budget is shared out among layers or heads, that is done by a program of its own, after this one.

    Args:
        dtype: of parameters and cache.
        chunk: the number of tokens that are read at a time; all of them if None.
        part: the chunk: one program reads the first, another all between, and a third the last. A prompt that is read
            in one piece has only a last one.

    Raises:
        ValueError: for sizes below 1, and a mesh that does not fit the model or the batch.
    """
    check_sizes(batch=batch, length=length, new_tokens=new_tokens)
    params, mesh, size = plan_params(config, dtype, mesh), fit_mesh(mesh, config), bucket(length)
    check_attached(policy, params)
    check_batch(batch, mesh)
    chunk = min(chunk or size, size)
    tokens, lengths = (
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows_sharding(mesh)) for shape in ((batch, chunk), (batch,))
    )

    def on_mesh(cache: KVCache) -> KVCache:
        cache = replace(cache, mesh=mesh)
        return placed(cache, cache.shardings)

    cache = on_mesh(jax.eval_shape(lambda: KVCache.empty(config, policy, jnp.full(batch, length), size, dtype)))
    end, before = ending(cache, "auto"), (-(-size // chunk) - 1) * chunk
    nothing = [0] * config.num_layers
    if before:
        plan = plan_read(cache, nothing, new=before, room=0, compress=False, final=False)
        if part == "first":
            return jitted_read.lower(params, cache, tokens, lengths, plan=plan)
        cache = on_mesh(jax.eval_shape(partial(read, plan=plan), params, replace(cache, mesh=None), tokens, lengths)[1])
        if part == "middle":
            return read_on.lower(params, cache, tokens, lengths, plan=plan)
    room = 0 if end.allocate else room_for(new_tokens)
    occupied = cache.entries.bounds
    plan = plan_read(cache, occupied, new=chunk, room=room, compress=end.compress, final=end.final)
    return jitted_read.lower(params, cache, tokens, lengths, plan=plan)


@own_modes()
def lower_decode(
    config: DecoderConfig,
    policy: Policy,
    *,
    mesh: Mesh,
    batch: int,
    length: int,
    new_tokens: int,
    dtype: Any = jnp.bfloat16,
    sampler: SamplingMethod | None = None,
) -> jax.stages.Lowered:
    """The loop that `generate` runs after prompts of `length` tokens, for the devices of a mesh of `make_mesh`.

    Args:
        dtype: of parameters and cache.
        sampler: `Greedy()` by default.

    Raises:
        ValueError: for sizes below 1, and a mesh that does not fit the model or the batch.
    """
    sampler = sampler or Greedy()
    params = plan_params(config, dtype, mesh)
    check_attached(policy, params)
    cache = plan_cache(config, policy, batch=batch, length=length, new_tokens=new_tokens, dtype=dtype, mesh=mesh)
    assert cache.mesh is not None
    by_row = rows_sharding(cache.mesh)

    def begin() -> Answers:
        sampling = Sampling(
            sampler,
            ends=np.full((batch, 1), -1, np.int32),
            keys=jax.random.split(jax.random.key(0), batch),
            seen=np.zeros((batch, config.vocab_size), bool) if sampler.needs_seen else None,
        )
        return Answers.begin(sampling, size=room_for(new_tokens), log_probs=False)

    answers = jax.eval_shape(begin)
    state = Decoding(cache, placed(answers, jax.tree.map(lambda _: by_row, answers)))
    logits = jax.ShapeDtypeStruct((batch, config.vocab_size), jnp.float32, sharding=by_row)
    return decode.lower(params, state, logits, jax.ShapeDtypeStruct((), jnp.int32))

"""Compiles ahead what `generate` runs, for a model without weights, and for devices that need not be here.

`.compile()` of what is lowered here needs the compiler of these devices but none of them; see `targets.py`. What comes
back says what the program takes (`memory_analysis()`), and `hlo.Loop` what a loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from kvjax.cache import bucket, room_for
from kvjax.checkpoint.parameters import Blank
from kvjax.checks import checked_size
from kvjax.decoding.loop import Answers, Decoding, Sampling, decode
from kvjax.decoding.sampling import Greedy, SamplingMethod
from kvjax.engine.compiling import Programs
from kvjax.kv_cache import KVCache
from kvjax.mesh.sharding import check_batch, fit_mesh, rows_sharding
from kvjax.models import Decoder, DecoderConfig
from kvjax.plan import on_mesh, placed, plan_cache
from kvjax.policy import Policy
from kvjax.policy.suits import check_attached
from kvjax.reading.prompt import Batch, Plan, complete, pieces
from kvjax.reading.replays import encoded_texts
from kvjax.reading.room import ending
from kvjax.runtime.modes import own_modes


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


class Lowered(Programs):
    """Programs that nobody has compiled.

    Attributes:
        lowered: by the name that they were given, or by the name of the function and a number.
    """

    def __init__(self, placed: Callable[[Any], Any]) -> None:
        super().__init__(placed)
        self.lowered: dict[str, jax.stages.Lowered] = {}

    def _compile(self, name: Hashable, lowered: jax.stages.Lowered) -> None:
        if not isinstance(name, str):
            function = name[0].__name__  # type: ignore[index]
            name = f"{function} {sum(other.startswith(function) for other in self.lowered)}"
        self.lowered[name] = lowered


def lower_prefill(config: DecoderConfig, policy: Policy, *, mesh: Mesh, **sizes: Any) -> dict[str, jax.stages.Lowered]:
    """Lowers the programs that `generate` reads prompts with, each once, by name, for a mesh of `make_mesh`.

    Args:
        sizes: as `read_ahead` takes them.
    """
    mesh = fit_mesh(mesh, config)
    programs = Lowered(partial(on_mesh, mesh=mesh))
    read_ahead(programs, config, policy, mesh=mesh, **sizes)
    return programs.lowered


@own_modes()
def read_ahead(
    programs: Programs,
    config: DecoderConfig,
    policy: Policy,
    *,
    mesh: Mesh,
    batch: int,
    length: int,
    new_tokens: int,
    dtype: Any = jnp.bfloat16,
    chunk: int | None = None,
) -> tuple[Float[Array, "B V"], KVCache]:
    """Adds the programs that `generate` reads prompts of `length` tokens with, and returns the shapes of the result.

    Texts that a score replays are taken to be empty.

    Args:
        dtype: of parameters and cache.
        chunk: the number of tokens that are read at a time; all of them if None.

    Raises:
        ValueError: for sizes below 1, and a mesh that does not fit the model or the batch.
    """
    batch, length = checked_size("batch", batch), checked_size("length", length)
    new_tokens = checked_size("new_tokens", new_tokens)
    params, mesh, size = plan_params(config, dtype, mesh), fit_mesh(mesh, config), bucket(length)
    check_attached(policy, params)
    check_batch(batch, mesh)

    def put(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows_sharding(mesh))

    cache = jax.eval_shape(lambda: KVCache.empty(config, policy, jnp.full(batch, length), size, dtype))
    cache = on_mesh(replace(cache, mesh=mesh), mesh)
    prompts = Batch(np.zeros((batch, size), np.int32), np.full(batch, length, np.int32))
    options: dict[str, Any] = {"room": room_for(new_tokens), "chunk": chunk, "compress": "auto"}
    plan = Plan.of(cache, prompts, ending(cache, "auto"), cache.entries.bounds, **options)
    texts = encoded_texts(policy, lambda _: ())
    return complete(pieces(params, cache, prompts, plan, texts, run=programs.compile, put=put))


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

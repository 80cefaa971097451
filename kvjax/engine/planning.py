"""Checks the arguments of an engine, and makes the choices that follow from them before anything is compiled."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from kvjax import policies
from kvjax.checks import check_params, checked_size
from kvjax.decoding.row_text import check_fast
from kvjax.mesh.sharding import check_batch, mesh_of, platform_of
from kvjax.models import Decoder
from kvjax.policy import Policy
from kvjax.policy.suits import check_model
from kvjax.request.ends import default_ends
from kvjax.request.request import as_policy, check_tokenizer, texts_of

from .hosts import check_hosts
from .memory import bytes_of
from .plans import Plans
from .sizes import CHUNK, ENDS, Sizes


def plans_of(
    params: Decoder,
    policy: Policy | str | None,
    *,
    rows: int,
    max_prompt: int,
    max_new_tokens: int,
    tokenizer: Any = None,
    chunk: int = CHUNK,
    max_end_tokens: int = ENDS,
    conversation_memory: int | str | None = None,
    conversation_device_memory: int | str | None = None,
) -> Plans:
    """The static choices of an engine with these arguments. `Engine` documents them.

    Raises:
        ValueError: for an argument that is not accepted.
    """
    check_params(params)
    check_tokenizer(tokenizer)
    if tokenizer is not None:
        check_fast(tokenizer)
    rows, max_prompt = checked_size("rows", rows), checked_size("max_prompt", max_prompt)
    max_new_tokens, chunk = checked_size("max_new_tokens", max_new_tokens), checked_size("chunk", chunk)
    config, mesh = params.config, mesh_of(params)
    chosen = as_policy(policy) or policies.full()
    ends = max(checked_size("max_end_tokens", max_end_tokens), len(default_ends(params, tokenizer)))
    sizes = Sizes.of(rows, max_prompt, max_new_tokens, chunk=chunk, ends=ends, platform=platform_of(params))
    texts = texts_of(chosen, tokenizer, config.vocab_size)
    if mesh is not None:
        check_hosts(mesh)
    check_batch(rows, mesh)
    check_model(chosen, params)
    dtype, keeps = jnp.dtype(params.embed.dtype), conversation_memory is not None
    stays = conversation_device_memory
    most = 0 if stays is None else bytes_of(stays, "conversation_device_memory")
    return Plans.of(config, chosen, sizes, dtype, mesh, texts, keeps=keeps, device_memory=most)

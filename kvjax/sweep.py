"""Reading a prompt once, to compress it to many budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.attention import expire, settled
from kvjax.cache import KVCache, LayerCache
from kvjax.clock import Clock
from kvjax.extend import bucket, plan_slots, read_prompt, replayed, shared_out
from kvjax.heads import Heads
from kvjax.models import AttentionLayer, Decoder
from kvjax.policy import Policy
from kvjax.prompts import Prompt
from kvjax.protocols import Moment
from kvjax.session import Session
from kvjax.sharding import fetch
from kvjax.spread import over_layers


def prefill_each(
    params: Decoder,
    prompt: Prompt,
    *,
    policies: Sequence[Policy],
    tokenizer: Any = None,
    cache: KVCache | None = None,
    chunk: int | None = None,
    clock: Clock | None = None,
) -> Iterator[KVCache]:
    """What `prefill` gives under each of several policies that read alike, though the prompt is read once.

    Reading and scoring do not depend on budgets, on what is protected, selected and merged: for a curve over budgets
    the model runs once. All layers are held in full until the last cache has been made.

    Args:
        policies: of the same score, rhythm, positions and storage.
        prompt, tokenizer, chunk: as `prefill` takes them.
        cache: of a beginning of the prompt, read with `compress="never"` under a policy that reads alike.
        clock: counts the programs run as "prefill".

    Raises:
        ValueError: for policies that do not read alike, and a cache that was compressed or, where a score replays the
            prompt, any; as `prefill` otherwise.
    """
    policies = list(policies)
    if not policies:
        return
    config, clock = params.config, clock or Clock()
    first = policies[0] if cache is None else cache.policy
    for policy in policies:
        check_alike(first, policy, config.num_layers)
    if cache is not None and cache.filled:
        raise ValueError('the cache has been compressed; accepted is one that was read with compress="never"')
    first.score.check_whole(cache is None)
    session = Session.open(
        params, prompt, policy=first, tokenizer=tokenizer, cache=cache, chunk=chunk, compress="never"
    )
    tokens, lengths = session.batch.tokens, session.batch.lengths
    _, whole = read_prompt(params, session.cache, tokens, lengths, room=0, chunk=chunk, compress="never", clock=clock)
    run = partial(clock.run, "prefill")
    whole = replayed(params, whole, whole.put_rows(tokens), whole.put_rows(lengths), session.texts, run)
    size = bucket(int(np.max(fetch(whole.length))))
    for policy in policies:
        made = KVCache.empty(config, policy, whole.length, size, params.embed.dtype, whole.mesh)
        layers = (replace(x, capacity=y.capacity) for x, y in zip(whole.layers, made.layers, strict=True))
        full = replace(made, layers=tuple(layers), length=whole.length, rope=whole.rope)
        if policy.shares:
            yield shared_out(params, full, room=0, begins=True, run=run)
        else:
            slots = plan_slots(full, [layer.slots for layer in full.layers], new=0, room=0, compress=True)
            yield run(compressed, params, full, slots=slots)


def check_alike(policy: Policy, other: Policy, layers: int) -> None:
    """Raises ValueError unless two policies make the same of a prompt until they compress it."""

    def reading(policy: Policy) -> dict[str, Any]:
        return {
            "score": policy.score,
            "positions": policy.positions,
            "storage": policy.storage,
            "every": policy.every is not None,
            "merge's bias": policy.merge.biases,
            "limited layers": [policy.limited(layer) for layer in range(layers)],
        }

    ours, theirs = reading(policy), reading(other)
    for name, value in ours.items():
        if theirs[name] != value:
            raise ValueError(
                f"policies that differ in their {name} ({value} and {theirs[name]}) do not read a prompt alike; "
                "accepted are policies that differ in budget, protection, selection and merge"
            )


@partial(jax.jit, static_argnames="slots")
def compressed(params: Decoder, cache: KVCache, *, slots: tuple[int, ...]) -> KVCache:
    """The cache of a prompt that was read with `compress="never"`, compressed to layers of so many slots."""
    change = partial(_settle, cache.policy, kept=cache.kept, slots=slots)
    layers = over_layers(
        cache.mesh, change, params.attention_layers, cache.layers, next_position=cache.length, rope=cache.rope
    )
    return replace(cache, layers=layers, filled=True).in_place()


def _settle(
    policy: Policy,
    records: Sequence[AttentionLayer],
    layers: tuple[LayerCache, ...],
    next_position: Int[Array, "B"],
    rope: Float[Array, "B R/2"] | None,
    heads: Heads,
    *,
    kept: Sequence[int | None],
    slots: Sequence[int],
) -> tuple[LayerCache, ...]:
    """All layers as they are when a prompt has been read to its end."""
    done = []
    for record, entries, most, size in zip(records, layers, kept, slots, strict=True):
        moment = Moment(next_position, record, rope, heads)
        entries = expire(entries, moment, next_position > 0)
        done.append(settled(policy, entries, moment, kept=most, slots=size, final=True))
    return tuple(done)

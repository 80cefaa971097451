"""Reading a prompt once and compressing it to many budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.allocate import allocated, check_one_call, replayed
from kvjax.attend import expired, finished, over_layers
from kvjax.cache import Layers, bucket
from kvjax.checks import check_params, check_type
from kvjax.clock import Clock
from kvjax.heads import Heads
from kvjax.kv_cache import KVCache
from kvjax.models import AttentionLayer, Decoder
from kvjax.modes import own_modes
from kvjax.policy import Moment, Policy
from kvjax.programs import jit
from kvjax.prompts import Prompt
from kvjax.request import Request, as_policy, read_request
from kvjax.room import plan_read
from kvjax.sharding import fetch
from kvjax.shown import shown


@own_modes()
def prefill_each(
    params: Decoder,
    prompt: Prompt,
    *,
    policies: Sequence[Policy | str],
    tokenizer: Any = None,
    cache: KVCache | None = None,
    chunk: int | None = None,
    clock: Clock | None = None,
) -> Iterator[KVCache]:
    """Yields what `prefill` returns under each of several policies that read alike; the prompt is read once.

    Reading and observing do not depend on budget, protection, selection and merge, so the model runs once for a curve
    over budgets. All layers stay in full until the last cache is made.

    Args:
        policies: policies, or texts for `policies.parse`, with the same score, `every`, positions and storage.
        prompt, tokenizer, chunk: as `prefill` takes them.
        cache: the beginning of the prompt, read with `compress="never"` under a policy that reads alike.
        clock: counts the programs run as "prefill".

    Raises:
        ValueError: at the call: for policies that do not read alike; for a cache that was compressed; for any cache if
            the score replays the prompt; and as `prefill` does.
    """
    each = _given(policies)
    if not each:
        return iter(())
    check_params(params)
    if cache is not None:
        check_type("cache", cache, KVCache)
    first = each[0] if cache is None else cache.policy
    for policy in each:
        check_alike(first, policy, params.config.num_layers)
    if cache is not None and cache.filled:
        raise ValueError('the cache has been compressed: expected one that was read with compress="never"')
    check_one_call(first, cache is None)
    request = Request.of(params, prompt, policy=first, tokenizer=tokenizer, cache=cache, chunk=chunk, compress="never")
    return _in_own_modes(_each(params, request, each, clock or Clock()))


def _given(policies: Any) -> list[Policy]:
    """The policies, of which each may be a text. Raises ValueError."""
    if isinstance(policies, str) or not isinstance(policies, Sequence):
        raise ValueError(f"policies={shown(policies)}: expected a list of policies or texts")
    each = [policy for policy in map(as_policy, policies) if policy is not None]
    if len(each) < len(policies):
        raise ValueError("policies has None in it: expected a list of policies or texts")
    return each


def _in_own_modes(caches: Iterator[KVCache]) -> Iterator[KVCache]:
    """The same caches. Between two of them the caller's modes of JAX hold."""
    while True:
        with own_modes():
            cache = next(caches, None)
        if cache is None:
            return
        yield cache


def _each(params: Decoder, request: Request, policies: Sequence[Policy], clock: Clock) -> Iterator[KVCache]:
    """The caches of a checked request, which are computed when they are asked for."""
    tokens, lengths = request.batch.tokens, request.batch.lengths
    _, full = read_request(params, request, clock)
    run = partial(clock.run, "prefill")
    full = replayed(params, full, full.put_rows(tokens), full.put_rows(lengths), request.texts, run)
    size = bucket(int(np.max(fetch(full.length))))
    for policy in policies:
        made = KVCache.empty(params.config, policy, full.length, size, params.embed.dtype, full.mesh)
        layers = (
            replace(x, capacity=y.capacity, merging=y.merging) for x, y in zip(full.entries, made.entries, strict=True)
        )
        own = replace(made, entries=Layers(tuple(layers)), length=full.length, rope=full.rope)
        if policy.allocates:
            yield allocated(params, own, room=0, begins=True, run=run)
        else:
            plan = plan_read(own, own.entries.bounds, new=0, room=0, compress=True, final=True)
            yield run(compressed, params, own, slots=plan.slots)


def check_alike(policy: Policy, other: Policy, layers: int) -> None:
    """Raises ValueError unless two policies treat a prompt alike until they compress it."""

    def reading(policy: Policy) -> dict[str, Any]:
        return {
            "score": policy.score,
            "positions": policy.positions,
            "storage": policy.storage,
            "every": policy.every is not None,
            "merge's bias": policy.merge.effects.bias,
            "limited layers": [policy.limited(layer) for layer in range(layers)],
        }

    ours, theirs = reading(policy), reading(other)
    for name, value in ours.items():
        if theirs[name] != value:
            raise ValueError(
                f"policies that differ in their {name} ({value} and {theirs[name]}) do not read a prompt alike; "
                "expected policies that differ in budget, protection, selection and merge only"
            )


@partial(jit, static_argnames="slots")
def compressed(params: Decoder, cache: KVCache, *, slots: tuple[int, ...]) -> KVCache:
    """The cache of a prompt that was read with `compress="never"`, compressed to layers with these slots."""
    change = partial(_compressed, cache.policy, kept=cache.kept, slots=slots)
    entries = over_layers(
        cache.mesh, change, params.attention_layers, cache.entries, next_position=cache.length, rope=cache.rope
    )
    return replace(cache, entries=entries, filled=True).in_place()


def _compressed(
    policy: Policy,
    records: Sequence[AttentionLayer],
    layers: Layers,
    next_position: Int[Array, "B"],
    rope: Float[Array, "B C/2"] | None,
    heads: Heads,
    *,
    kept: Sequence[int | None],
    slots: Sequence[int],
) -> Layers:
    """All layers as they are when a prompt has been read to its end."""
    done = []
    for record, entries, most, size in zip(records, layers, kept, slots, strict=True):
        moment = Moment(next_position, record, rope, heads)
        entries = expired(entries, moment, next_position > 0)
        done.append(finished(policy, entries, moment, kept=most, slots=size, final=True))
    return Layers(tuple(done))

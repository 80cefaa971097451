"""Memory: the bytes of a cache are a closed form (U6), and decoding adds nothing to them (U7)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from kvjax import policies
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.pallas_kernels import PAGE
from kvjax.parts import GatedShares, Quantized, SalientCodes, SeenShare, ThinKeys
from kvjax.policy import LayerShape, Policy
from kvjax.reading.layers import step as one_step
from kvjax.reading.prompt import Batch, read_prompt
from tests import tiny
from tests.policy.expected_budgets import budget_of
from tests.policy.presets import ALL, ROOM, SIZE, decode, decoder, draw, every_policy
from tests.products import part


def expected_bytes(policy: Policy, batch: int, params: Decoder) -> int:
    """Keys, values and positions of every slot, a capacity for every head, and the policy's state; float32."""
    config = params.config
    if policy.allocates:
        return batch * pool_bytes(policy, config)
    heads, dim, total = config.num_kv_heads, config.head_dim, 0
    for layer in range(config.num_layers):
        slots = budget_of(policy, layer, SIZE) or SIZE
        if isinstance(policy.storage, ThinKeys):  # older entries lie apart
            newest, left = min(policy.storage.recent, slots), dim - int(dim * policy.storage.ratio)
            total += heads * ((slots - newest) * ((left + dim) * 4 + 4) + left * 4)
            slots = newest
        if isinstance(policy.storage, SalientCodes):  # nothing of the prompt is in slots
            others = int(slots * (1 - policy.storage.salient) + 1e-9)
            for count, bits in ((slots - others, policy.storage.bits), (others, policy.storage.other_bits)):
                ranges = 2 * count + 2 * dim
                total += heads * (count * (2 * (dim * bits // 8) + 4) + ranges * 4)
            total += heads * dim * 4
            slots = 0
        if not policy.evicts(layer, config.num_layers):
            slots += ROOM
        elif isinstance(policy.budget, SeenShare):
            slots += math.ceil(policy.budget.share * ROOM) + policy.every - 1
        if isinstance(policy.storage, Quantized):
            bits, group = policy.storage.bits, policy.storage.group or dim
            entry = 2 * (dim * bits // 8 + dim // group * 2)
        else:
            entry = 2 * dim * 4
        total += heads * (slots * (entry + 4) + 4)
        if policy.merge.effects.bias and policy.limited(layer):
            total += heads * slots * 4
        if policy.evicts(layer, config.num_layers):
            per_slot, per_row = state_bytes(policy, config)
            total += heads * slots * per_slot + per_row
    return batch * total


def state_bytes(policy: Policy, config) -> tuple[int, int]:
    """The bytes that score and merge have per slot of a kv head, and beside these in an evicting layer of a row.

    By the shapes of `init`: state per slot has axes [B, H, ..., slots], state per row has none of slots.
    """
    slots, heads = 8, config.num_kv_heads
    shape = LayerShape(1, config.num_heads, heads, config.head_dim, np.dtype(np.float32), config.hidden_size, slots)
    per_slot, per_row = jax.eval_shape(partial(policy.score.init, shape))
    merging = jax.eval_shape(partial(policy.merge.init, shape))
    for leaf in jax.tree.leaves(per_slot):
        assert leaf.shape[:2] == (1, heads)
        assert leaf.shape[-1] == slots
    sizes = [sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x)) for x in (per_slot, per_row, merging)]
    return sizes[0] // (heads * slots), sizes[1] + sizes[2]


def pool_bytes(policy: Policy, config) -> int:
    """Pages of rows for the retained entries, for the page that each segment begins, and for the answer."""
    heads, layers, layout = config.num_kv_heads, config.num_layers, policy.budget.layout
    lanes, mean = layout.groups or heads, budget_of(policy, 0, SIZE)
    segments = layers * heads
    assert mean is not None
    kept, growing = segments // lanes * mean, segments // lanes if policy.every is None else 0
    if isinstance(policy.budget, GatedShares):  # of the lane with most full heads
        growing = np.array(policy.budget.full).reshape(layers, lanes, -1).sum(axis=(0, 2)).max()
        kept += growing * (SIZE - mean)
    rows = kept + segments // lanes * (PAGE - 1) + growing * ROOM
    per_slot, per_row = state_bytes(policy, config) if policy.every is not None else (0, 0)
    entry = 4 * (2 * config.head_dim + 1) + per_slot
    return lanes * -(-rows // PAGE) * PAGE * entry + 16 * segments + layers * per_row


def filled(params: Decoder, spec: str, rows: list[np.ndarray]) -> KVCache:
    """The cache after a prompt, for its shapes."""
    tokens, lengths = tiny.left_pad(rows, SIZE)
    return read_prompt(params, tiny.empty(params, spec, lengths, SIZE), Batch(tokens, lengths), room=ROOM)[1]


@pytest.mark.slow
@every_policy
def test_bytes_are_the_closed_form_whatever_the_length(spec):
    """U6 and U7, by shapes: a step gives a cache of the shapes that it takes, so that all steps are one program."""
    params, policy = decoder(spec), policies.parse(spec)
    rows, tokens = draw(0, (SIZE, 7, 15), steps=1)
    cache = jax.eval_shape(partial(filled, spec=spec, rows=rows), params)
    assert cache.nbytes == expected_bytes(policy, 3, params)
    _, first = jax.eval_shape(tiny.step, params, cache, tokens[0], np.ones(3, bool))
    _, second = jax.eval_shape(tiny.step, params, first, tokens[0], np.ones(3, bool))
    assert first.nbytes == expected_bytes(policy, 3, params)
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (one.shape, one.dtype, one.weak_type) == (other.shape, other.dtype, other.weak_type)


RUN = (
    "h2o:budget=12,recent=3,every=3,sinks=1",
    "lagkv:budget=12,sinks=1,lag=3,every=2",
    "adakv:base=h2o,base.budget=12,base.recent=3,alpha=0.5,formula=kvpress",
    "kvcompose:budget=0.5,score.source=self,score.rows=mean,structured=False,min_tokens=1,score.value_norm=vo",
    "quantize:policy=morphkv,policy.budget=12,policy.window=4",
)


# By the shapes above, the steps of all policies are one program. These have one of each kind of storage.
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("spec", part(ALL, RUN), scope="session")
def test_bytes_are_the_closed_form_and_stay_so(spec):
    """U6 and U7, for answers of 40 tokens, or of 8 where they are added to the cache."""
    params, policy = decoder(spec), policies.parse(spec)
    steps = 40 if policy.evicts(0, params.config.num_layers) else 8
    rows, tokens = draw(0, (SIZE, 7, 15), steps=steps)
    _, cache = tiny.prefill(params, spec, rows, SIZE, room=ROOM)
    assert cache.nbytes == expected_bytes(policy, 3, params)
    _, cache = decode(params, cache, tokens[:1])[-1]
    programs = tiny.step._cache_size()
    _, cache = decode(params, cache, tokens[1:])[-1]
    assert cache.nbytes == expected_bytes(policy, 3, params)
    assert tiny.step._cache_size() == programs


TOKENS, POSITIONS = 1_000, 512  # more than the positions that the decoder's configuration names


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["morphkv:budget=12,window=4", "h2o:budget=12", "streaming_llm:budget=12"])
def test_a_thousand_tokens_compile_and_allocate_nothing_new(spec):
    """U7."""
    params = Decoder(replace(decoder(spec).config, max_positions=POSITIONS), nnx.Rngs(0))
    step = jax.jit(one_step, donate_argnames="cache")
    rows, tokens = draw(7, (SIZE, 5, 17), steps=TOKENS)
    _, cache = tiny.prefill(params, spec, rows, SIZE)
    incoming = np.ones(3, bool)
    for i, token in enumerate(tokens):
        logits, cache = step(params, cache, token, incoming)
        if i == 10:
            alive, programs, size = len(jax.live_arrays()), step._cache_size(), cache.nbytes
    assert np.isfinite(logits).all()
    assert (len(jax.live_arrays()), step._cache_size(), cache.nbytes) == (alive, programs, size)
    assert cache.length.tolist() == [TOKENS + 24, TOKENS + 5, TOKENS + 17]
    assert max(tiny.held(cache, 0)[0][0]) == TOKENS + 23

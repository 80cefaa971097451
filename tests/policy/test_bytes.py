"""Memory: the bytes of a cache are a closed form (U6), and decoding adds nothing to them (U7)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from kvjax import policies
from kvjax.extend import step as one_step
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder
from kvjax.pallas_kernels import PAGE
from kvjax.parts import (
    AccumulatedAttention,
    BlockByBlock,
    FoldedWindow,
    GatedShares,
    GlobalAttention,
    JointImportance,
    LastAttention,
    LearnedScore,
    Neglect,
    NoisyAttention,
    ProjectedValues,
    Quantized,
    QueryHeadAttention,
    QuerySample,
    RecurrenceInterval,
    RobustAttention,
    SalientCodes,
    SimilarityMerge,
    StochasticAttention,
    ThinKeys,
    Votes,
    WindowAttention,
)
from kvjax.policy import Policy
from kvjax.reading.prompt import read_prompt
from kvjax.runtime.clock import Clock
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
        if isinstance(policy.storage, ThinKeys):  # older entries lie apart, in a slot or more
            newest, left = min(policy.storage.recent, slots), dim - int(dim * policy.storage.ratio)
            total += heads * (max(slots - newest, 1) * ((left + dim) * 4 + 4) + left * 4)
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
        if isinstance(policy.storage, Quantized):
            bits, group = policy.storage.bits, policy.storage.group or dim
            entry = 2 * (dim * bits // 8 + dim // group * 2)
        else:
            entry = 2 * dim * 4
        total += heads * (slots * (entry + 4) + 4)
        if policy.merge.effects.bias and policy.limited(layer):
            total += heads * slots * 4
        if policy.evicts(layer, config.num_layers):
            per_slot, per_row = state_numbers(policy, config)
            total += 4 * (heads * slots * per_slot + per_row)
    return batch * total


def state_numbers(policy: Policy, config) -> tuple[int, int]:
    """The 32-bit numbers that an evicting layer of a row has per slot of a kv head, and beside these."""
    score, heads = policy.score, config.num_kv_heads
    per_slot = per_row = 0
    if isinstance(score, QueryHeadAttention):
        per_slot, score = config.num_heads // heads, score.base
    if isinstance(score, ProjectedValues | BlockByBlock):
        score = score.base
    if isinstance(score, QuerySample):
        per_row, score = score.queries * (config.num_heads * config.head_dim + 2 * heads), score.base
    if isinstance(score, AccumulatedAttention | LastAttention | LearnedScore | NoisyAttention):
        per_slot += 1
    if isinstance(score, NoisyAttention):
        per_row += heads
    if isinstance(score, GlobalAttention | RecurrenceInterval | RobustAttention):
        per_slot += 2
    if isinstance(score, Neglect | Votes):
        per_slot += -(-score.window // 32)
    if isinstance(score, Votes):
        per_slot += 1
    if isinstance(score, FoldedWindow):
        per_slot += score.columns + score.ahead
    if isinstance(
        score, FoldedWindow | WindowAttention | JointImportance | GlobalAttention | StochasticAttention
    ):  # the window's queries, their log-sum-exp and positions
        per_row += score.window * (config.num_heads * (config.head_dim + 1) + heads)
    if isinstance(policy.merge, SimilarityMerge):  # a threshold per head
        per_row += heads
    return per_slot, per_row


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
    per_slot, per_row = state_numbers(policy, config) if policy.every is not None else (0, 0)
    numbers = 2 * config.head_dim + 1 + per_slot
    return 4 * (lanes * -(-rows // PAGE) * PAGE * numbers + 4 * segments + layers * per_row)


class Untimed(Clock):
    """Traces a program where a clock would compile it."""

    def run(self, name, program, *args, **kwargs):
        return program(*args, **kwargs)


def filled(params: Decoder, spec: str, rows: list[np.ndarray]) -> KVCache:
    """The cache after a prompt, for its shapes."""
    tokens, lengths = tiny.left_pad(rows, SIZE)
    cache, options = tiny.empty(params, spec, lengths, SIZE), {"room": ROOM, "chunk": None, "compress": "auto"}
    return read_prompt(params, cache, tokens, lengths, **options, clock=Untimed())[1]


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

"""What holds for every policy, whatever the text and the weights.

U1. A prompt and an answer within the budget give the logits of full attention.
U2. Each head retains distinct positions of its row's text: as many as the budget allows, and as the merge leaves.
U3. Protected entries, the first and the most recent ones, are retained.
U4. The order of slots does not matter: the same entries in other slots give the same logits and the same evictions.
U5. A row gives the same result beside other rows, at another place of the batch, and alone with more padding.
U6. The bytes of a cache are a closed form of shapes and policy (`test_bytes.py`).
U7. Decoding compiles nothing and allocates nothing, however long the answer is (`test_bytes.py`).
U8. A query group of equal heads acts like one head, and heads that share keys act like heads with equal keys.

A row that has ended stays as it is, bit for bit, while others are decoded.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import parts, policies
from kvjax.cache import Layers, Slots
from kvjax.parts import GatedShares, GaussianMerge, SeenShare
from kvjax.policy import PLAIN, Moment, Policy
from tests import tiny
from tests.methods.literal_crush import literal as crushed
from tests.methods.literal_merging import merge_down
from tests.policy.expected_budgets import budget_of
from tests.policy.presets import (
    BUDGET,
    ROOM,
    SIZE,
    SPECS,
    STEPS,
    assert_same_rows,
    decode,
    decoder,
    draw,
    each_kind_of_policy,
    one_of_each_budget,
    run,
    some_alone,
    tolerance,
)

texts = st.tuples(st.integers(0, 2**32 - 1), st.tuples(*[st.integers(1, SIZE)] * 3))
few = settings(max_examples=5)
gathered = jax.jit(Slots.gather)


def test_every_preset_is_here():
    assert set(SPECS) == set(policies.PRESETS)


@pytest.mark.long(first=1)
@one_of_each_budget
@few
@given(text=texts)
def test_retains_distinct_tokens_of_its_text_within_the_budget_and_the_protected(spec, text):
    """U2 and U3, after the prompt and after each step, with the exact number of entries of each head."""
    params, policy = decoder(spec), policies.parse(spec)
    rows, tokens = draw(*text)
    steps = [cache for _, cache in run(params, spec, rows, tokens)]
    for b, row in enumerate(rows):
        if policy.allocates:
            for i, cache in enumerate(steps):
                check_allocation(policy, tiny.held(cache, b), len(row), i)
            continue
        for layer, layers in enumerate(zip(*(tiny.held(cache, b) for cache in steps), strict=True)):
            numbers = occupancies(policy, params, steps, b, row, layer)
            for i, heads in enumerate(layers):
                seen = len(row) + i
                budget, recent = budget_after(policy, layer, row, i), policy.protect.recent
                recent = int(recent * (budget or 0)) if isinstance(recent, float) else recent
                for head, number in zip(heads, numbers[i], strict=True):
                    assert len(head) == len(set(head)) == number
                    assert set(head) <= set(range(seen))
                    assert set(range(max(0, seen - recent), seen)) <= set(head)
                    assert set(range(min(policy.protect.sinks, seen))) <= set(head)


def budget_after(policy, layer, row, steps) -> int | None:
    """The entries per head of a layer after so many steps; None if it retains everything."""
    return budget_of(policy, layer, len(row) + (steps if isinstance(policy.budget, SeenShare) else 0))


def occupancies(policy, params, steps, b, row, layer) -> list[list[int]]:
    """The number of entries of each head of a row after the prompt and after each step."""
    heads, budget = params.config.num_kv_heads, budget_after(policy, layer, row, 0)
    if budget is None:
        return [[len(row) + i] * heads for i in range(len(steps))]
    numbers = [[min(len(row), budget)] * heads]
    if isinstance(policy.merge, GaussianMerge):
        numbers = [[len(own) for own in merged(policy, before_compression(policy, params, row), len(row), budget)]]
    elif getattr(policy.select, "granularity", "token") == "page":
        numbers = [[len(own) for own in whole_pages(policy, before_compression(policy, params, row), row, budget)]]
    for i, cache in enumerate(steps[:-1]):
        budget = budget_after(policy, layer, row, i + 1)
        room = budget - (policy.every or 0)
        if policy.every is None:
            left = numbers[-1]
        elif isinstance(policy.merge, GaussianMerge):  # sets of similar tokens may free more slots than `every`
            held = [entries_of(cache, cache.entries[layer], params, b, h) for h in range(heads)]
            left = [
                len(merged(policy, [own], len(row) + i, budget, room)[0]) if len(own) >= budget else len(own)
                for own in held
            ]
        else:
            left = [room if n >= budget else n for n in numbers[-1]]
        numbers.append([n + 1 for n in left])
    return numbers


@partial(jax.jit, static_argnums=0)
def ranked(policy, params, entries, length):
    """The scores [B, H, S] of the entries of the first layer."""
    return policy.rank(entries, Moment(length, params.attention_layers[0]), None, raised=False)


def entries_of(cache, entries, params, b, h) -> dict[int, tuple]:
    """{position: (key, value, score, 1)} of a head."""
    scores = np.asarray(ranked(cache.policy, params, entries, cache.length))[b, h]
    arrays = (np.asarray(x[b, h], np.float64) for x in (entries.keys, entries.values))
    rows = zip(np.asarray(entries.positions[b, h]).tolist(), *arrays, scores, strict=True)
    return {p: (*entry, 1) for p, *entry in rows if p >= 0}


def before_compression(policy, params, row) -> list[dict[int, tuple]]:
    """All entries of the heads of the only layer, once its prompt has been read."""
    _, cache = tiny.prefill(params, policy, [row], SIZE, compress="never")
    return [entries_of(cache, cache.entries[0], params, 0, h) for h in range(params.config.num_kv_heads)]


def merged(policy, heads, now, budget, room=None) -> list[dict]:
    """KVMerger's Algorithms 1 and 2, written for one head at a time."""
    merge, recent = policy.merge, policy.protect.recent
    recent, heavy = (int(x * budget + 1e-4) if isinstance(x, float) else x for x in (recent, merge.heavy))
    options = {"theta": merge.theta, "rule": merge.rule, "straddle": merge.straddle}
    room = budget if room is None else room
    return [merge_down(own, now, room, recent=recent, heavy=heavy, **options) for own in heads]


def whole_pages(policy, heads, row, budget) -> list[list[int]]:
    """KVCrush's Algorithms 1 and 2 on pages."""
    scores, n = [{p: entry[2] for p, entry in own.items()} for own in heads], len(row)
    select = policy.select
    protected = set(range(min(policy.protect.sinks, n))) | set(range(max(0, n - policy.protect.recent), n))
    options = {"page": select.page, "side_by_side": True, "ages": {p: n - p for p in range(n)}}
    return crushed(scores, [budget] * len(heads), select.share, protected=protected, **options)


def check_allocation(policy: Policy, layers: list[list[list[int]]], length: int, decoded: int) -> None:
    """Checks the total that an allocated budget retains of a row, and that the answer is added to it if it grows."""
    heads = [head for layer in layers for head in layer]
    mean, recent = budget_of(policy, 0, length), policy.protect.recent
    assert mean is not None
    if policy.learned is not None and mean < length:  # its tokens follow the prompt, and the budget pays for them
        length, recent = length + policy.learned.count, recent + policy.learned.count
    seen = length + decoded
    read, answer = (length, decoded) if policy.every is None else (seen, 0)
    protected = {*range(max(0, read - recent), seen), *range(min(policy.protect.sinks, seen))}
    for held in heads:
        assert len(held) == len(set(held))
        assert protected <= set(held) <= set(range(seen))
    if isinstance(policy.budget, GatedShares):
        full = np.ravel(policy.budget.full)
        assert [len(head) for head in heads] == np.where(full, seen, min(seen, mean)).tolist()
        return
    kept = sum(map(len, heads)) - answer * len(heads)
    most = len(heads) * min(mean, read)
    fewer = parts.DynamicShares | parts.HeadShares | parts.ImportanceShares | parts.LazyLayers | parts.RecoveringHeads
    assert kept == most or isinstance(policy.budget, fewer), "layers compete for the whole total"
    assert kept <= most


@each_kind_of_policy
@few
@given(seed=st.integers(0, 2**32 - 1), lengths=st.tuples(*[st.integers(1, BUDGET - 4)] * 3))
def test_within_the_budget_it_is_full_attention(spec, seed, lengths):
    """U1. A share of the prompt is all of it here, without the answer. A quantised policy equals a quantised cache."""
    share = "budget=0." in spec
    spec = spec.replace("budget=0.5", "budget=1.0").replace("budget=0.4", "budget=1.0")
    if spec.startswith("rising"):
        spec = re.sub(r"share=[\d.]+", "share=1.0", spec)
    rows, tokens = draw(seed, lengths, steps=0 if share else 4)
    params, policy = decoder(spec), policies.parse(spec)
    if policy.storage == PLAIN:
        texts = [np.append(row, more) for row, more in zip(rows, tokens.T, strict=True)]
        whole = tiny.full_logits(params, texts, SIZE)
        expected = [[whole[b][len(row) - 1 + i] for b, row in enumerate(rows)] for i in range(len(tokens) + 1)]
    else:
        expected = [logits for logits, _ in run(params, replace(policies.full(), storage=policy.storage), rows, tokens)]
    for (logits, _), wanted in zip(run(params, spec, rows, tokens), expected, strict=True):
        np.testing.assert_allclose(logits, wanted, atol=tolerance(policy))


def shuffled(cache, seed, alike):
    """The same entries in other slots, which are the same ones in all heads of a row if `alike`."""
    rng = np.random.default_rng(seed)

    def shuffle(layer):
        rows, heads, slots = layer.positions.shape
        order = rng.permuted(np.broadcast_to(np.arange(slots), (rows, 1 if alike else heads, slots)), axis=-1)
        return gathered(layer, np.broadcast_to(order, layer.positions.shape))

    if isinstance(cache.entries, Layers):
        return replace(cache, entries=Layers(tuple(map(shuffle, cache.entries))))
    pool = cache.entries
    rows = np.broadcast_to(np.arange(pool.positions.shape[2]), pool.positions.shape).copy()
    for (i, b, h), first in np.ndenumerate(np.asarray(pool.start)):  # within the used rows of each segment
        own = rows[b, h * pool.lanes // pool.kv_heads, first : first + int(pool.used[i][b, h])]
        rng.shuffle(own)
    b, lane = np.arange(len(rows))[:, None, None], np.arange(pool.lanes)[:, None]
    moved = {name: getattr(pool, name) for name in ("keys", "values", "positions", "per_slot", "bias")}
    return replace(cache, entries=replace(pool, **jax.tree.map(lambda x: np.asarray(x)[b, lane, rows], moved)))


@each_kind_of_policy
@few
@given(text=texts)
def test_the_order_of_slots_is_free(spec, text):
    """U4. TOVA averages over heads slot by slot, so its heads hold the same token in the same slot."""
    rows, tokens = draw(*text)
    params = decoder(spec)
    _, cache = tiny.prefill(params, spec, rows, SIZE, room=ROOM)
    alike = "heads_alike" in cache.policy.score.needs.marks
    mine, others = decode(params, cache, tokens), decode(params, shuffled(cache, text[0], alike), tokens)
    for row in range(3):
        assert_same_rows(mine, others, row, row)


@each_kind_of_policy
@few
@given(text=texts, others=texts)
def test_a_row_is_the_same_in_any_company(spec, text, others):
    """U5."""
    params = decoder(spec)
    rows, tokens = draw(*text)
    company, company_tokens = draw(*others)
    mine = run(params, spec, rows, tokens)
    moved = run(params, spec, [*company[:2], rows[0]], np.column_stack([company_tokens[:, :2], tokens[:, 0]]))
    assert_same_rows(mine, moved, 0, 2)


@pytest.mark.slow
@some_alone
@few
@given(text=texts)
def test_a_row_is_the_same_alone_with_more_padding(spec, text):
    """U5."""
    params = decoder(spec)
    rows, tokens = draw(*text)
    assert_same_rows(run(params, spec, rows, tokens), run(params, spec, rows[:1], tokens[:, :1], SIZE + 8))


def twice_the_queries(mha):
    """The same decoder with every query head twice and half as loud: a group of two."""
    gqa = nnx.clone(mha)
    gqa.config = replace(mha.config, num_heads=2 * mha.config.num_heads)
    for layer in gqa.layers:
        attention = layer.attention
        attention.query = nnx.Param(jnp.asarray(np.repeat(attention.query[...], 2, axis=1)))
        attention.output = nnx.Param(jnp.asarray(np.repeat(attention.output[...], 2, axis=0) / np.float32(2)))
    return gqa


def twice_the_keys(gqa):
    """The same decoder with a kv head for each query head of a group of two."""
    mha = nnx.clone(gqa)
    mha.config = replace(gqa.config, num_kv_heads=2 * gqa.config.num_kv_heads)
    for layer in mha.layers:
        attention = layer.attention
        attention.key = nnx.Param(jnp.asarray(np.repeat(attention.key[...], 2, axis=1)))
        attention.value = nnx.Param(jnp.asarray(np.repeat(attention.value[...], 2, axis=1)))
    return mha


# MorphKV's group="logits" is not here: the softmax of a group's summed logits depends on the number of heads.
@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "h2o:budget=12,recent=3,every=3,sinks=1",  # a program of other tests serves the larger group
        "tova:budget=12,every=3",
        "snapkv:budget=12,window=4,kernel=3",
        "morphkv:budget=12,window=4,fusion=max",
        "criticalkv:base=h2o,base.budget=12",
        "finch:budget=12,window=4",
        "expected_attention:budget=12,sinks=2,future=8",
        # The scores of h2o under another selection and merge, and scores of keys and values alone.
        pytest.param("d2o:budget=12,layer_budgets=False", marks=pytest.mark.exhaustive),
        pytest.param("chunkkv:base=h2o,base.budget=12,length=5", marks=pytest.mark.exhaustive),
        pytest.param("lagkv:budget=12,sinks=2,lag=4", marks=pytest.mark.exhaustive),
    ],
)
def test_a_group_of_equal_heads_is_one_head(spec):
    """U8. The steps of a policy that never evicts are those of snapkv. CriticalKV scores as at the end of a prompt."""
    evicts = policies.parse(spec).every is not None
    steps = STEPS if (evicts and "criticalkv" not in spec) or "snapkv" in spec else 0
    rows, tokens = draw(5, (SIZE, 5, 17), steps=steps)
    mha = tiny.decoder(2, 2)
    mine, others = run(mha, spec, rows, tokens), run(twice_the_queries(mha), spec, rows, tokens)
    for row in range(3):
        assert_same_rows(mine, others, row, row)


IN_CACHE = "streaming_llm:budget=12,positions=in_cache,every=3"
CHUNKS = "chunkkv:base=snapkv,base.budget=12,base.window=4,base.pool=none,length=5"


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", IN_CACHE, "tova:budget=12,every=3", CHUNKS])
def test_heads_that_share_keys_are_heads_with_equal_keys(spec):
    """U8 for the policies that retain the same tokens in all heads."""
    rows, tokens = draw(6, (SIZE, 5, 17))
    gqa = decoder(spec)
    mine, others = run(gqa, spec, rows, tokens), run(twice_the_keys(gqa), spec, rows, tokens)
    for (logits, cache), (other_logits, other_cache) in zip(mine, others, strict=True):
        np.testing.assert_allclose(logits, other_logits, atol=2e-5)
        for row in range(3):
            for heads, other_heads in zip(tiny.held(cache, row), tiny.held(other_cache, row), strict=True):
                assert [head for head in heads for _ in range(2)] == other_heads


@each_kind_of_policy
@few
@given(text=texts, finished=st.integers(0, 2))
def test_a_finished_row_is_left_alone_bit_for_bit(spec, text, finished):
    rows, tokens = draw(*text)
    params = decoder(spec)
    _, cache = tiny.prefill(params, spec, rows, SIZE, room=ROOM)
    expected = decode(params, cache, tokens)
    incoming = np.arange(3) != finished
    left = cache
    for token, (logits, other) in zip(tokens, expected, strict=True):
        got, left = tiny.step(params, left, token, incoming)
        np.testing.assert_allclose(got[incoming], logits[incoming], atol=tolerance(cache.policy))
        for row in np.flatnonzero(incoming):
            assert tiny.held(left, row) == tiny.held(other, row)
    before, after = (jax.tree.leaves((c.entries, c.length, c.pending)) for c in (cache, left))
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(x)[finished], np.asarray(y)[finished])

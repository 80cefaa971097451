"""What holds for every policy, whatever the text and the weights."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import policies
from kvjax.extend import step as one_step
from kvjax.pallas_kernels import PAGE
from kvjax.parts import (
    AccumulatedAttention,
    DynamicShares,
    FoldedWindow,
    GatedShares,
    LastAttention,
    Neglect,
    NoisyAttention,
    ProjectedValues,
    Pyramid,
    Quantized,
    ThresholdAttention,
)
from kvjax.policy import Policy
from kvjax.protocols import Storage
from tests import tiny

SIZE, BUDGET, ROOM, STEPS = 24, 12, 8, 6

SPECS = {
    "full": ("",),
    "streaming_llm": (
        "budget=12,sinks=2",
        "budget=12,positions=in_cache,every=3",
        "budget=0.5,sinks=1,every=None",
    ),
    "h2o": ("budget=12", "budget=12,recent=3,every=3", "budget=0.5,recent=0.25,group=max"),
    "tova": ("budget=12", "budget=12,every=3", "budget=0.4,recent=2,every=None"),
    "snapkv": ("budget=12,window=4,kernel=3", "budget=0.5,window=3,pool=avg,kernel=5,group=max"),
    "morphkv": (
        "budget=12,window=4",
        "budget=12,window=4,fusion=max,every=3,dense_layers=1",
        "budget=12,window=3,normalise=distant,group=logits",
        "budget=0.5,window=3,normalise=distant,group=max",
    ),
    "cam": ("budget=12,sinks=2,tokens=4,form=expected", "budget=12,tokens=3,every=3"),
    "d2o": ("budget=12,recent=0.25,layer_budgets=False", "budget=12,recent=2,layer_budgets=False,weights=code,every=3"),
    "kvmerger": (
        "budget=12,recent=4,heavy=2,theta=None",
        "budget=0.5,theta=0.2,rule=chain,straddle=True,count_bias=True",
    ),
    "pyramidkv": ("budget=12,window=4,kernel=3,beta=2", "budget=0.5,window=3,kernel=3,beta=2,formula=code"),
    "expected_attention": ("budget=12,sinks=2,future=8,epsilon=0.01", "budget=0.5,sinks=0,value_norm=False"),
    "finch": ("budget=0.5,window=3,chunk=6",),
    "knorm": ("budget=12,sinks=1,recent=2",),
    "keydiff": ("budget=12,every=1",),
    "lagkv": ("budget=12,sinks=1,lag=3,every=2",),
    "random": ("budget=0.5,recent=2", "budget=12,seed=3,every=2"),
    "keyformer": ("budget=12,recent=4",),
    "scissorhands": ("budget=12,window=8,recent=4,drop=0.25",),
    "dynamickv": ("budget=12,window=4,kernel=3,interval=1", "budget=0.5,window=3,kernel=3,code_rounding=True"),
    "kvcompose": ("budget=12", "budget=0.5,source=self,rows=mean,structured=False,min_tokens=1,value_norm=vo"),
    "kvcrush": (
        "base=snapkv,base.budget=12,base.window=4,base.kernel=3,share=0.5",
        "base=h2o,base.budget=12,base.recent=3,pick=kmeans,anchor=alternate",
        "base=h2o,base.budget=12,base.recent=2,share=0.5,granularity=page,page=3",
    ),
    "chunkkv": ("base=snapkv,base.budget=12,base.window=4,base.kernel=3,length=5",),
    "adakv": (
        "base=snapkv,base.budget=12,base.window=4,base.kernel=3",
        "base=h2o,base.budget=12,base.recent=3,alpha=0.5,formula=kvpress",
    ),
    "kvzip": ("budget=0.5,sinks=2,chunk=10,instruction='',starting='',suffix=''",),
    "duo_attention": ("sinks=2,recent=10,groups=2",),
    "criticalkv": ("base=h2o,base.budget=12,base.recent=3,first=0.4",),
    "quantize": (
        "policy=morphkv,policy.budget=12,policy.window=4",
        "policy=cam,policy.budget=12,policy.tokens=4,policy.form=expected,bits=4,group=4",
    ),
}
ALL = [f"{name}:{options}".rstrip(":") for name, specs in SPECS.items() for options in specs]

every_policy = pytest.mark.parametrize("spec", ALL)
texts = st.tuples(st.integers(0, 2**32 - 1), st.tuples(*[st.integers(1, SIZE)] * 3))
few = settings(max_examples=5)


def test_every_preset_is_here():
    assert set(SPECS) == set(policies.PRESETS)


def decoder(spec):
    """One layer does for what treats all alike."""
    layers_differ = policies.parse(spec).shares or "dense_layers" in spec or "pyramid" in spec
    if "duo_attention" in spec:
        return tiny.decoder(windows=(None,) * 4)  # as many layers and kv heads as the gates that ship with kvjax
    return tiny.decoder(windows=(None, None) if layers_differ else (None,))


def draw(seed, lengths, steps=STEPS):
    """Rows of a prompt, and the tokens [steps, B] to decode after it."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, tiny.VOCAB, n) for n in lengths], rng.integers(0, tiny.VOCAB, (steps, len(lengths)))


def decode(params, cache, tokens):
    """[(logits, cache)] after each of the tokens [steps, B]."""
    steps = []
    for token in tokens:
        logits, cache = tiny.step(params, cache, token, np.ones(len(token), bool))
        steps.append((np.asarray(logits), cache))
    return steps


def run(params, spec, rows, tokens, size=SIZE):
    """[(logits, cache)] after the prompt and after each decoded token."""
    logits, cache = tiny.prefill(params, spec, rows, size, room=ROOM)
    return [(np.asarray(logits), cache), *decode(params, cache, tokens)]


def tolerance(policy: Policy) -> float:
    """Float32's accuracy, or room for a few codes that it rounds the other way."""
    return 2e-5 if policy.storage == Storage() else 5e-3


def assert_same_rows(mine, others, row=0, other=0):
    """The same logits to float32's accuracy, and the very same entries, at every step."""
    for (logits, cache), (other_logits, other_cache) in zip(mine, others, strict=True):
        np.testing.assert_allclose(logits[row], other_logits[other], atol=tolerance(cache.policy))
        assert tiny.held(cache, row) == tiny.held(other_cache, other)


def budget_of(policy: Policy, layer: int, length: int) -> int | None:
    """What a preset's docstring promises, worked out anew: entries, a share of the prompt, or no limit."""
    if not policy.limited(layer):
        return None
    budget = getattr(policy.budget, "budget", policy.budget)
    entries = getattr(budget, "entries", None) or int(budget.share * length)
    if isinstance(policy.budget, Pyramid):  # two layers: the last one has 1/beta of the mean, the first one the rest
        window, steepness = policy.budget.window, policy.budget.beta
        low = max(entries - window, 0) // steepness
        levels = [2 * (entries - window) - low, low]
        if policy.budget.formula == "code":
            if levels[0] >= length - window:
                levels = [length - window, 2 * (entries - window) - (length - window)]
            if length < max(2 * (entries - window), entries):
                levels = [entries - window] * 2
        entries = levels[layer] + window
    return max(entries, policy.minimum)


@every_policy
@few
@given(text=texts)
def test_keeps_distinct_tokens_of_its_text_within_the_budget_and_the_protected(spec, text):
    """U2 and U3: at the prompt's end and after each step."""
    policy = policies.parse(spec)
    loose = "kvmerger" in spec or "page=" in spec  # merging, and whole pages, may leave slots empty
    rows, tokens = draw(*text)
    for i, (_, cache) in enumerate(run(decoder(spec), spec, rows, tokens)):
        for b, row in enumerate(rows):
            seen = len(row) + i
            if policy.shares:
                check_shares(policy, tiny.held(cache, b), len(row), i)
                continue
            for layer, heads in enumerate(tiny.held(cache, b)):
                budget = budget_of(policy, layer, len(row))
                for held in heads:
                    assert len(held) == len(set(held))
                    assert set(held) <= set(range(seen))
                    if budget is None:
                        assert len(held) == seen
                        continue
                    if policy.every is None:
                        most = min(len(row), budget) + i
                        assert len(held) == most or loose, "the answer comes on top"
                        assert len(held) <= most
                    elif seen <= budget:
                        assert len(held) == seen, "nothing goes before the budget is used up"
                    else:
                        assert budget - policy.every < len(held) or loose
                        assert len(held) <= budget
                    recent = policy.protect.recent
                    recent = int(recent * budget) if isinstance(recent, float) else recent
                    assert set(range(max(0, seen - recent), seen)) <= set(held)
                    assert set(range(min(policy.protect.sinks, seen))) <= set(held)


def check_shares(policy: Policy, layers: list[list[list[int]]], length: int, decoded: int) -> None:
    """Of a budget that layers and heads share: what all of them hold, and whether the answer comes on top."""
    heads, seen = [head for layer in layers for head in layer], length + decoded
    mean, recent = budget_of(policy, 0, length), policy.protect.recent
    assert mean is not None
    read, answer = (length, decoded) if policy.every is None else (seen, 0)
    last = range(max(0, read - recent), seen)
    for held in heads:
        assert len(held) == len(set(held))
        assert set(held) <= set(range(seen))
        assert set(last) | set(range(min(policy.protect.sinks, seen))) <= set(held)
    if isinstance(policy.budget, GatedShares):
        full = np.ravel(policy.budget.full)
        assert [len(head) for head in heads] == np.where(full, seen, min(seen, mean)).tolist()
        return
    kept = sum(map(len, heads)) - answer * len(heads)
    most = len(heads) * min(mean, read)
    assert kept == most or isinstance(policy.budget, DynamicShares), "layers compete for all that there is"
    assert kept <= most


@every_policy
@few
@given(seed=st.integers(0, 2**32 - 1), lengths=st.tuples(*[st.integers(1, BUDGET - 4)] * 3))
def test_within_the_budget_it_is_full_attention(spec, seed, lengths):
    """U1. A share of the prompt is all of it here, and covers the prompt alone. Quantised, it is the quantised one."""
    share = "budget=0." in spec
    spec = spec.replace("budget=0.5", "budget=1.0").replace("budget=0.4", "budget=1.0")
    rows, tokens = draw(seed, lengths, steps=0 if share else 4)
    params, policy = decoder(spec), policies.parse(spec)
    if policy.storage == Storage():
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
        return layer.gather(jnp.broadcast_to(order, layer.positions.shape))

    if cache.pool is None:
        return cache.map_layers(shuffle)
    pool, T = cache.pool, cache.pool.keys.shape[2]
    rows = np.broadcast_to(np.arange(T), pool.positions.shape).copy()
    for (b, h, i), first in np.ndenumerate(np.asarray(pool.start)):  # within what is used of each segment
        own = rows[b, h * pool.lanes // pool.start.shape[1], first : first + int(pool.used[b, h, i])]
        rng.shuffle(own)
    b, lane = np.arange(len(rows))[:, None, None], np.arange(pool.lanes)[:, None]
    moved = (pool.keys, pool.values, pool.positions, pool.per_slot)
    keys, values, positions, per_slot = jax.tree.map(lambda x: x[b, lane, rows], moved)
    return replace(cache, pool=replace(pool, keys=keys, values=values, positions=positions, per_slot=per_slot))


@every_policy
@few
@given(text=texts)
def test_the_order_of_slots_is_free(spec, text):
    """U4. TOVA averages over heads slot by slot: they hold the same token in the same slot."""
    rows, tokens = draw(*text)
    params = decoder(spec)
    _, cache = tiny.prefill(params, spec, rows, SIZE, room=ROOM)
    mine, others = decode(params, cache, tokens), decode(params, shuffled(cache, text[0], alike="tova" in spec), tokens)
    for row in range(3):
        assert_same_rows(mine, others, row, row)


@every_policy
@few
@given(text=texts, others=texts)
def test_a_row_is_the_same_in_any_company_and_alone(spec, text, others):
    """U5: beside other rows, at another place in the batch, and alone with more padding."""
    params = decoder(spec)
    rows, tokens = draw(*text)
    company, company_tokens = draw(*others)
    mine = run(params, spec, rows, tokens)
    moved = run(params, spec, [*company[:2], rows[0]], np.column_stack([company_tokens[:, :2], tokens[:, 0]]))
    assert_same_rows(mine, moved, 0, 2)
    assert_same_rows(mine, run(params, spec, rows[:1], tokens[:, :1], SIZE + 8))


def expected_bytes(spec: str, batch: int, params) -> int:
    """Keys, values and positions of every slot, a capacity for every head, and the policy's state; float32."""
    policy, config = policies.parse(spec), params.config
    score = policy.score.base if isinstance(policy.score, ProjectedValues) else policy.score
    heads, dim = config.num_kv_heads, config.head_dim
    if policy.shares:  # pages of rows for all that is kept, for a page begun by each segment, and for the answer
        segments = config.num_layers * heads
        lanes = policy.budget.groups or heads
        mean = budget_of(policy, 0, SIZE)
        assert mean is not None
        kept, growing = segments // lanes * mean, segments // lanes if policy.every is None else 0
        if isinstance(policy.budget, GatedShares):  # of the lane with most full heads
            growing = np.array(policy.budget.full).reshape(config.num_layers, lanes, -1).sum(axis=(0, 2)).max()
            kept += growing * (SIZE - mean)
        rows = kept + segments // lanes * (PAGE - 1) + growing * ROOM
        state = isinstance(score, AccumulatedAttention) and policy.every is not None
        return batch * (lanes * -(-rows // PAGE) * PAGE * (2 * dim + 1 + state) + 4 * segments) * 4
    total = 0
    for layer in range(config.num_layers):
        slots = budget_of(policy, layer, SIZE) or SIZE
        if policy.every is None or not policy.limited(layer):
            slots += ROOM
        if isinstance(policy.storage, Quantized):
            bits, group = policy.storage.bits, policy.storage.group or dim
            entry = 2 * (dim * bits // 8 + dim // group * 2)
        else:
            entry = 2 * dim * 4
        total += batch * heads * (slots * (entry + 4) + 4)
        if isinstance(score, AccumulatedAttention | LastAttention | NoisyAttention) and policy.every:
            total += batch * heads * slots * 4
        if isinstance(policy.score, ThresholdAttention):
            total += batch * heads * 4
        if policy.merge.biases and policy.limited(layer):
            total += batch * heads * slots * 4
        if isinstance(policy.score, Neglect):
            total += batch * heads * slots * 4
        if isinstance(policy.score, NoisyAttention):
            total += batch * heads * 4
        if "morphkv" in spec and policy.limited(layer):
            total += batch * policy.score.window * (config.num_heads * (dim + 1) + heads) * 4
        if isinstance(policy.score, FoldedWindow) and policy.limited(layer):
            total += batch * heads * slots * (policy.score.columns + policy.score.ahead) * 4
    return total


@every_policy
def test_bytes_are_the_closed_form_and_stay_so(spec):
    """U6, and U7: nothing is compiled and nothing grows however long the answer."""
    params = decoder(spec)
    rows, tokens = draw(0, (SIZE, 7, 15), steps=8 if policies.parse(spec).grows(0) else 40)
    _, cache = tiny.prefill(params, spec, rows, SIZE, room=ROOM)
    assert cache.nbytes == expected_bytes(spec, 3, params)
    _, cache = decode(params, cache, tokens[:1])[-1]
    programs = tiny.step._cache_size()
    _, cache = decode(params, cache, tokens[1:])[-1]
    assert cache.nbytes == expected_bytes(spec, 3, params)
    assert tiny.step._cache_size() == programs


def twice_the_queries(mha):
    """The same decoder with each query head there twice and half as loud: a group of two."""
    gqa = nnx.clone(mha)
    gqa.config = replace(mha.config, num_heads=2 * mha.config.num_heads)
    for layer in gqa.layers:
        attention = layer.attention
        attention.query = nnx.Param(jnp.repeat(attention.query[...], 2, axis=1))
        attention.output = nnx.Param(jnp.repeat(attention.output[...], 2, axis=0) / 2)
    return gqa


def twice_the_keys(gqa):
    """The same decoder with a kv head of its own for each query head of a group of two."""
    mha = nnx.clone(gqa)
    mha.config = replace(gqa.config, num_kv_heads=2 * gqa.config.num_kv_heads)
    for layer in mha.layers:
        attention = layer.attention
        attention.key = nnx.Param(jnp.repeat(attention.key[...], 2, axis=1))
        attention.value = nnx.Param(jnp.repeat(attention.value[...], 2, axis=1))
    return mha


# One softmax of a group's summed logits is sharper than each head's: the only rule that counts its heads.
@pytest.mark.parametrize(
    "spec",
    [
        "h2o:budget=12",
        "tova:budget=12",
        "snapkv:budget=12,window=4,kernel=3",
        "morphkv:budget=12,window=4,fusion=max",
        "lagkv:budget=12,sinks=2,lag=4",
        "criticalkv:base=h2o,base.budget=12",
        pytest.param("finch:budget=12,window=4", marks=pytest.mark.slow),
        pytest.param("d2o:budget=12,layer_budgets=False", marks=pytest.mark.slow),
        pytest.param("chunkkv:base=h2o,base.budget=12,length=5", marks=pytest.mark.slow),
        pytest.param("expected_attention:budget=12,sinks=2,future=8", marks=pytest.mark.slow),
    ],
)
def test_a_group_of_equal_heads_is_one_head(spec):
    """U8."""
    rows, tokens = draw(5, (SIZE, 5, 17))
    mha = tiny.decoder(2, 2)
    mine, others = run(mha, spec, rows, tokens), run(twice_the_queries(mha), spec, rows, tokens)
    for row in range(3):
        assert_same_rows(mine, others, row, row)


CHUNKS = "chunkkv:base=snapkv,base.budget=12,base.window=4,base.pool=none,length=5"


@pytest.mark.parametrize("spec", ["full", "streaming_llm:budget=12,sinks=2", "tova:budget=12", CHUNKS])
def test_heads_that_share_keys_are_heads_with_equal_keys(spec):
    """U8 for the policies that keep the same tokens in all heads."""
    rows, tokens = draw(6, (SIZE, 5, 17))
    gqa = decoder(spec)
    mine, others = run(gqa, spec, rows, tokens), run(twice_the_keys(gqa), spec, rows, tokens)
    for (logits, cache), (other_logits, other_cache) in zip(mine, others, strict=True):
        np.testing.assert_allclose(logits, other_logits, atol=2e-5)
        for row in range(3):
            for heads, other_heads in zip(tiny.held(cache, row), tiny.held(other_cache, row), strict=True):
                assert [head for head in heads for _ in range(2)] == other_heads


@every_policy
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


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["morphkv:budget=12,window=4", "h2o:budget=12", "streaming_llm:budget=12"])
def test_ten_thousand_tokens_compile_and_allocate_nothing_new(spec):
    params = decoder(spec)
    step = jax.jit(one_step, donate_argnames="cache")
    rows, tokens = draw(7, (SIZE, 5, 17), steps=10_000)
    _, cache = tiny.prefill(params, spec, rows, SIZE)
    incoming = np.ones(3, bool)
    for i, token in enumerate(tokens):
        logits, cache = step(params, cache, token, incoming)
        if i == 10:
            alive, programs, size = len(jax.live_arrays()), step._cache_size(), cache.nbytes
    assert np.isfinite(logits).all()
    assert (len(jax.live_arrays()), step._cache_size(), cache.nbytes) == (alive, programs, size)
    assert cache.length.tolist() == [10_024, 10_005, 10_017]
    assert max(tiny.held(cache, 0)[0][0]) == 10_023

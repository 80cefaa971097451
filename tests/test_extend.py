"""`extend` and `read_prompt`: a prompt in one call, in chunks, in turns and token by token give the same caches."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax import policies
from kvjax.cache import bucket
from kvjax.extend import extend
from kvjax.kv_cache import KVCache
from kvjax.models import Decoder, DecoderConfig, Rope
from kvjax.reading.layers import read
from kvjax.reading.prompt import Batch, read_prompt
from kvjax.reading.room import check_room, plan_read, usage, with_room
from tests import tiny
from tests.products import part

SPECS = [
    "full",
    "streaming_llm:budget=12,positions=in_cache",
    "h2o:budget=12",
    "tova:budget=12",
    "snapkv:budget=12,window=4,kernel=3",
    "snapkv:budget=0.5,window=6,pool=avg,kernel=5",
    "morphkv:budget=12,window=6,fusion=max,every=3,dense_layers=1",
    "expected_attention:budget=12,sinks=2,future=8",
    "chunkkv:base=h2o,base.budget=12,length=5",
    "criticalkv:base=finch,base.budget=12,base.window=4",
]
# Their scores are those of others above, or they have none; reading knows no selection.
ALIKE = (SPECS[0], SPECS[1], "snapkv:budget=12,window=4,kernel=3", "chunkkv:base=h2o,base.budget=12,length=5")
SIZE = 24
ROWS = [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (SIZE, 3, 17)]
STEPS = np.random.default_rng(1).integers(0, tiny.VOCAB, (4, 3))


def decode(params, cache, steps=STEPS):
    logits = []
    for tokens in steps:
        out, cache = tiny.step(params, cache, tokens, np.ones(len(tokens), bool))
        logits.append(np.asarray(out))
    return logits, cache


def assert_same(mine, other, batch=3):
    """Asserts that two pairs (logits, cache) have the same logits up to rounding, and the same entries."""
    np.testing.assert_allclose(mine[0], other[0], atol=2e-5)
    for row in range(batch):
        assert tiny.held(mine[1], row) == tiny.held(other[1], row)
    assert mine[1].length.tolist() == other[1].length.tolist()


@pytest.mark.long(first=1)
@pytest.mark.slow(first=2)
@pytest.mark.parametrize("spec", part(SPECS, [spec for spec in SPECS if spec not in ALIKE]))
def test_a_prompt_in_chunks_is_a_prompt_in_one_go(spec):
    """Chunks divide no row evenly, and are longer than one row. Those of 5 tokens are shorter than some windows."""
    chunk = 5 if "window" in spec else 13
    params = tiny.decoder(windows=(None, None) if "dense_layers" in spec else (None,))
    whole = tiny.prefill(params, spec, ROWS, SIZE)
    chunked = tiny.prefill(params, spec, ROWS, SIZE, chunk=chunk)
    assert_same(whole, chunked)
    if spec == "full" or policies.parse(spec).every is not None:
        assert_same(decode(params, whole[1]), decode(params, chunked[1]))
    else:  # the steps are those of a full cache
        same = partial(np.testing.assert_allclose, atol=2e-5)
        jax.tree.map(same, whole[1].entries, chunked[1].entries)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 23])
@pytest.mark.parametrize("spec", ["snapkv:budget=12,window=4,kernel=3"])
def test_chunks_shorter_than_the_window_and_nearly_the_prompt(spec, chunk):
    params = tiny.decoder()
    assert_same(tiny.prefill(params, spec, ROWS, SIZE), tiny.prefill(params, spec, ROWS, SIZE, chunk=chunk))


@pytest.mark.long
def test_the_first_chunk_is_a_plain_prompt(monkeypatch):
    """It attends to itself alone, the second to the slots that both leave as well."""
    module = import_module("kvjax.attend.received")
    seen, attend = [], module.prompt_attention

    def counted(q, k, *arrays, **options):
        seen.append((q.shape[2], k.shape[2]))
        return attend(q, k, *arrays, **options)

    monkeypatch.setattr(module, "prompt_attention", counted)
    tiny.prefill(tiny.decoder(windows=(None,)), "full", ROWS, SIZE, chunk=12)
    assert seen == [(12, 12), (12, 24)]


LIMITED = [spec for spec in SPECS if "budget=12" in spec and "dense" not in spec]


@pytest.mark.slow
@pytest.mark.parametrize("spec", part(LIMITED, [spec for spec in LIMITED if spec not in (SPECS[1], SPECS[8])]))
def test_compressing_after_every_chunk_never_holds_more_than_the_budget(spec):
    """The number of slots is the budget, whatever the length of the prompt, plus room where the cache grows."""
    params, policy = tiny.decoder(), policies.parse(spec)
    rows = [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (96, 11, 50)]
    logits, cache = tiny.prefill(params, policy, rows, 96, room=4, chunk=8, compress="chunk")
    slots = 12 + 4 * (policy.every is None)
    assert {layer.slots for layer in cache.entries} == {slots}
    assert np.isfinite(logits).all()
    for row, n in enumerate((12, 11, 12)):
        assert [len(head) for heads in tiny.held(cache, row) for head in heads] == [n] * 2
    short = tiny.prefill(params, policy, [rows[1]] * 3, SIZE)
    np.testing.assert_allclose(logits[1], short[0][1], atol=2e-5)


@pytest.mark.slow
def test_sinks_and_the_newest_are_the_same_however_the_prompt_is_cut():
    """StreamingLLM needs no scores, so the time of compression does not change which entries it retains."""
    params, spec = tiny.decoder(), "streaming_llm:budget=12,sinks=2"
    _, whole = tiny.prefill(params, spec, ROWS, SIZE)
    _, cut = tiny.prefill(params, spec, ROWS, SIZE, chunk=5, compress="chunk")
    assert [tiny.held(cut, row) for row in range(3)] == [tiny.held(whole, row) for row in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["full", "morphkv:budget=12,window=4,every=3"])
def test_extending_leaves_the_given_cache_as_it_was(spec):
    params = tiny.decoder()
    _, cache = tiny.prefill(params, spec, ROWS, SIZE)
    before = jax.tree.map(np.array, cache)
    for tokens in (STEPS[:1].T, STEPS.T):
        _, extended = extend(params, cache, tokens)
        assert extended.length.tolist() == (before.length + tokens.shape[1]).tolist()
    read_prompt(params, cache, Batch(np.tile(STEPS.T, (1, 3)), np.full(3, 12)), room=8, chunk=5)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, cache))


def test_several_tokens_at_once_are_one_at_a_time():
    """A question that extends a full cache in one call equals the question read token by token."""
    params = tiny.decoder()
    _, cache = tiny.prefill(params, "full", ROWS, SIZE)
    at_once = extend(params, cache, STEPS.T)
    logits, one_by_one = decode(params, cache)
    assert_same(at_once, (logits[-1], one_by_one))


@pytest.mark.slow
def test_a_question_of_one_token_and_of_two_behave_alike():
    """A question does not compress a prompt again. The budget of an evicting policy holds after every call."""
    params = tiny.decoder()
    for spec, sizes in (("snapkv:budget=12,window=4", (13, 14)), ("morphkv:budget=12,window=4", (12, 12))):
        _, cache = tiny.prefill(params, spec, ROWS, SIZE)
        for n, size in zip((1, 2), sizes, strict=True):
            _, longer = extend(params, cache, STEPS[:n].T)
            assert [len(head) for heads in tiny.held(longer, 0) for head in heads] == [size] * 2


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("spec", ["h2o:budget=12", "snapkv:budget=12,window=4", "morphkv:budget=12,window=4"])
def test_rows_take_as_many_tokens_as_they_have(spec):
    """Rows take 4, 0 and 2 tokens in one call, each as if all took as many. A row without tokens stays as it is."""
    params = tiny.decoder()
    _, cache = tiny.prefill(params, spec, ROWS, SIZE)
    logits, turn = extend(params, cache, STEPS.T, np.array([4, 0, 2]))
    assert tiny.held(turn, 1) == tiny.held(cache, 1)
    assert turn.length.tolist() == [SIZE + 4, 3, 19]
    for row, n in ((0, 4), (2, 2)):
        expected, alike = extend(params, cache, STEPS.T[:, 4 - n :])
        np.testing.assert_allclose(logits[row], expected[row], atol=2e-5)
        assert tiny.held(turn, row) == tiny.held(alike, row)
    following, _ = decode(params, turn, STEPS[:1])
    direct, _ = decode(params, cache, STEPS[:1])
    np.testing.assert_allclose(following[0][1], direct[0][1], atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["streaming_llm:budget=12,positions=in_cache", "morphkv:budget=12,window=4"])
def test_twenty_turns_in_constant_memory(spec):
    """A dialogue of 20 turns of 5 tokens with answers of 3 tokens takes constant memory."""
    params = tiny.decoder()
    _, cache = tiny.prefill(params, spec, ROWS, SIZE)
    size = cache.nbytes
    for turn in range(20):
        tokens = np.random.default_rng(turn).integers(0, tiny.VOCAB, (3, 8))
        _, cache = extend(params, cache, tokens[:, :5])
        logits, cache = decode(params, cache, tokens[:, 5:].T)
        assert cache.nbytes == size
    assert np.isfinite(logits[-1]).all()
    assert cache.length.tolist() == [SIZE + 160, 163, 177]
    for row in range(3):
        for heads in tiny.held(cache, row):
            assert all(len(head) == 12 and head[-1] == cache.length[row] - 1 for head in heads)


WINDOWED = (8,)


SPECS_OF_A_WINDOW = ("full", "h2o:budget=30", "snapkv:budget=30,window=4", "streaming_llm:budget=30")
IN_ONE_GO = product(SPECS_OF_A_WINDOW, [None])
IN_CHUNKS = product(("full", "h2o:budget=30"), [5])  # one without a score, and one with a score of every query


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("spec", "chunk"), part(product(SPECS_OF_A_WINDOW, (None, 5)), [*IN_ONE_GO, *IN_CHUNKS]))
def test_a_sliding_window_is_attention_with_that_window_and_needs_no_more_slots(spec, chunk):
    params = tiny.decoder(windows=WINDOWED)
    logits, cache = tiny.prefill(params, spec, ROWS, SIZE, room=20, chunk=chunk)
    steps = np.random.default_rng(2).integers(0, tiny.VOCAB, (12, 3))
    expected = tiny.full_logits(params, [np.append(r, t) for r, t in zip(ROWS, steps.T, strict=True)], SIZE + 12)
    decoded, after = decode(params, cache, steps)
    for i, got in enumerate([np.asarray(logits), *decoded]):
        for b, row in enumerate(ROWS):
            np.testing.assert_allclose(got[b], expected[b][len(row) - 1 + i], atol=2e-5)
    assert {layer.slots for c in (cache, after) for layer in c.entries} == {8}
    assert tiny.held(after, 0)[0][0] == list(range(SIZE + 12 - 8, SIZE + 12))


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("spec", ["full", "h2o:budget=6", "morphkv:budget=6,window=4"])
def test_finished_rows_of_a_sliding_window_stay_bit_for_bit(spec):
    """The window has moved on by one token, so that the next step would empty another slot of the finished row."""
    params = tiny.decoder(windows=WINDOWED)
    _, cache = tiny.prefill(params, spec, ROWS, SIZE)
    _, before = tiny.step(params, cache, STEPS[0], np.ones(3, bool))
    _, after = tiny.step(params, before, STEPS[1], np.array([True, True, False]))
    assert tiny.held(after, 0) != tiny.held(before, 0)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[2], y[2]), before, after)


@pytest.mark.slow
def test_a_window_larger_than_the_text_and_a_layer_without_one():
    params = tiny.decoder(windows=(None, 100))
    _, cache = tiny.prefill(params, "full", ROWS, SIZE, room=4)
    assert [layer.slots for layer in cache.entries] == [SIZE + 4] * 2
    logits, _ = decode(params, cache)
    expected = tiny.full_logits(params, [np.append(r, t) for r, t in zip(ROWS, STEPS.T, strict=True)], SIZE + 4)
    np.testing.assert_allclose(logits[-1], [row[-1] for row in expected], atol=2e-5)


def test_with_room_adds_empty_slots_where_the_cache_grows_and_nowhere_else():
    params = tiny.decoder()
    tokens, lengths = tiny.left_pad(ROWS, SIZE)
    _, full = extend(params, tiny.empty(params, "full", lengths, SIZE), tokens, lengths)
    with pytest.raises(ValueError, match=r"layer 0 has room for 0 tokens, not 1; call kvjax.with_room"):
        extend(params, full, STEPS[:1].T)
    roomy = with_room(full, 4)
    assert all(layer.slots >= SIZE + 4 for layer in roomy.entries)
    assert tiny.held(roomy, 0) == tiny.held(full, 0)
    assert with_room(roomy, 2) is roomy
    free = usage(roomy).free[0]
    check_room(roomy, free)
    with pytest.raises(ValueError, match=f"layer 0 has room for {free} tokens, not {free + 1};"):
        check_room(roomy, free + 1)
    expected = tiny.full_logits(params, [np.append(ROWS[0], STEPS[:, 0])], SIZE + 4)
    np.testing.assert_allclose(decode(params, roomy)[0][-1][0], expected[0][-1], atol=2e-5)
    _, evicting = tiny.prefill(params, "h2o:budget=12", ROWS, SIZE)
    assert with_room(evicting, 1000) is evicting


@pytest.mark.long
def test_extend_is_usable_inside_jit():
    params = tiny.decoder()
    _, cache = tiny.prefill(params, "morphkv:budget=12,window=4", ROWS, SIZE)
    inside = jax.jit(partial(extend, compress="end"))(params, cache, STEPS.T)
    assert_same(inside, extend(params, cache, STEPS.T, compress="end"))


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("compress", ["end", "never"])
def test_compress_is_explicit(compress):
    """`compress` decides against the default: "end" for a policy that never evicts, "never" for one that does."""
    params = tiny.decoder()
    _, cache = tiny.prefill(params, "snapkv:budget=12,window=4" if compress == "end" else "h2o:budget=12", ROWS, SIZE)
    _, longer = extend(params, cache, STEPS.T, compress=compress)
    assert [len(head) for heads in tiny.held(longer, 0) for head in heads] == [12 if compress == "end" else 16] * 2


def test_errors_name_what_is_accepted():
    params = tiny.decoder()
    _, cache = tiny.prefill(params, "h2o:budget=12", ROWS, SIZE)
    with pytest.raises(ValueError, match=r"made by .*AccumulatedAttention.*cannot be extended with .*Recency"):
        extend(params, cache, STEPS.T, policy=policies.full())
    extend(params, cache, STEPS.T, policy=policies.h2o(budget=12))
    for tokens in (STEPS.T[0], STEPS.T[:2], STEPS.T[:, :0]):
        with pytest.raises(ValueError, match=r"tokens have shape .*expected \[3, N\]"):
            extend(params, cache, tokens)
    with pytest.raises(ValueError, match=r"compress='always'.*'auto', 'never', 'end'"):
        extend(params, cache, STEPS.T, compress="always")
    for tokens in (STEPS.T + 0.5, jnp.asarray(STEPS.T + 0.5), jnp.asarray(STEPS.T > 0)):
        with pytest.raises(ValueError, match=r"(?s)tokens.*: expected integers"):
            extend(params, cache, tokens)
    with pytest.raises(ValueError, match=r"lengths is a JAX array of dtype float32: expected integers"):
        extend(params, cache, STEPS.T, jnp.ones(3))
    for lengths in ([1, 2], [5, 1, 1], [1, -1, 1]):
        with pytest.raises(ValueError, match=r"lengths=.*expected 3 integers in 0 \.\. 4"):
            extend(params, cache, STEPS.T, np.array(lengths))


def test_buckets_are_few_and_tight():
    sizes = {bucket(n) for n in range(1, 4097)}
    assert len(sizes) <= 20
    assert all(n <= bucket(n) <= max(16, 3 * n // 2) for n in range(1, 4097))


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["full", "streaming_llm:positions=in_cache", "h2o", "tova", "snapkv:budget=512", "morphkv:budget=512"]
)
def test_a_prompt_of_32k_tokens_never_holds_its_scores(spec):
    """The program is compiled, not run. All its temporaries take fewer bytes than one head has N x N weights.

    H2O keeps the exponentials of 256 queries and two heads, those of one layer at a time.
    """
    size = 32_768
    config = DecoderConfig("llama", 8, 16, 16, 2, 1, 8, (None, None), Rope(1e4), size)
    params = jax.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    policy = policies.parse(spec)
    cache = jax.eval_shape(lambda: KVCache.empty(config, policy, jnp.array([size]), size, jnp.float32))
    plan = plan_read(cache, [0, 0], new=size, room=16, compress=True, final=True)
    lowered = jax.jit(partial(read, plan=plan)).lower(
        params, cache, jax.ShapeDtypeStruct((1, size), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    )
    assert lowered.compile().memory_analysis().temp_size_in_bytes < size * 3072 < size * size // 8

"""Policies in 8 and 4 bits: their error, the codes that they hold, their bytes, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import kvjax
from kvjax.evaluation.tasks.demo import example
from kvjax.evaluation.tasks.vocabulary import IDS, STOP
from kvjax.pallas_kernels import QuantizedArray
from kvjax.parts import Fixed, GaussianMerge, GlobalShares, Quantized
from kvjax.policies import full, kvcrush, kvmerger, morphkv, parse, quantize, snapkv, streaming_llm
from kvjax.reading.layers import step as one_step
from tests.methods.literal_codes import rounded
from tests.methods.reference import rotated, softmax
from tests.policy.presets import ALL
from tests.policy.presets import decoder as decoder_for
from tests.products import part
from tests.tiny import decoder, prefill, step

RNG = np.random.default_rng(8)
ROWS = [RNG.integers(0, 99, n).tolist() for n in (44, 33, 5)]
MORPHKV = quantize(morphkv(24, window=4), bits=8)
IN_CACHE = quantize(streaming_llm(24, positions="in_cache", every=3), bits=4, group=4)
NEW = 12


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("quantize", quantize(full(), bits=8)),
        (
            "quantize:policy=morphkv,policy.budget=512,bits=4,group=16",
            quantize(morphkv(512), bits=4, group=16),
        ),
        (
            "kvcrush:base=quantize,base.policy=snapkv,base.policy.budget=64,share=0.5",
            quantize(kvcrush(snapkv(64), share=0.5)),
        ),
    ],
)
def test_as_text(text: str, policy: kvjax.Policy) -> None:
    assert parse(text) == policy
    assert parse(repr(policy)) == policy
    assert policy.storage != full().storage


def test_groups_that_do_not_fit_the_model() -> None:
    params, policy = decoder(), quantize(full(), group=3)
    for ask in (
        lambda: kvjax.generate(params, [1, 2, 3], policy=policy),
        lambda: kvjax.plan_cache(params.config, policy, batch=1, length=9, new_tokens=9, dtype=np.float32),
    ):
        with pytest.raises(ValueError, match="group=3: expected a divisor of the head size 8: 1, 2, 4, 8"):
            ask()
    with pytest.raises(ValueError, match="bits=4: expected bits=8 for heads of 9 channels"):
        Quantized(4).store(jnp.zeros((2, 9)))
    assert Quantized().store(jnp.zeros((2, 80))).scales.shape == (2, 5)  # groups of 16


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 4), (4, 32), (4, 4)])
def test_errors_are_those_of_rounding(bits: int, group: int) -> None:
    """At most half a scale; below the largest number of a group, errors are uniform: scale^2 / 12 in the mean."""
    x = RNG.uniform(-1, 1, (400, 64)).astype(np.float32)
    held = Quantized(bits, group).store(jnp.asarray(x))
    np.testing.assert_array_equal(held.dequantized(), rounded(x, bits, group))
    scales = np.asarray(held.scales, np.float64).repeat(group, axis=-1)
    magnitudes = np.abs(x).reshape(400, -1, group).max(axis=-1).repeat(group, axis=-1)
    np.testing.assert_allclose(scales, magnitudes / (2 ** (bits - 1) - 1), rtol=2**-8)
    errors = (np.asarray(held.dequantized(), np.float64) - x) / scales
    assert np.abs(errors).max() < 0.5 + 1e-4
    below = errors[np.abs(x) < magnitudes]
    deviation = np.sqrt(0.8 / below.size)  # 12 u^2 has a variance of 0.8 for u uniform between -1/2 and 1/2
    assert abs(12 * np.mean(below**2) - 1) < 5 * deviation


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("bits", [8, 4])
def test_logits_are_those_of_rounded_keys_and_values(bits: int) -> None:
    """Against attention in NumPy over rotated keys, and values, that are rounded before anything attends to them."""
    params = decoder(vocab=101)

    def attended(q, k, v):
        q, k, v = (np.asarray(x[0], np.float64) for x in (q, k, v))
        q, k = (np.stack([rotated(x[:, t], t, 1e4) for t in range(x.shape[1])], axis=1) for x in (q, k))
        k, v = (rounded(x, bits, group=4).astype(np.float64) for x in (k, v))
        logits = np.einsum("hgnd,hmd->hgnm", q.reshape(k.shape[0], -1, *q.shape[1:]), k) * params.config.scale
        weights = softmax(np.where(np.tri(k.shape[1], dtype=bool), logits, -np.inf))
        context = np.einsum("hgnm,hmd->hgnd", weights, v)
        return context.reshape(1, *q.shape).astype(np.float32)

    @jax.jit
    def expected(tokens):
        def attend(layer, q, k, v, cache):
            return io_callback(attended, jax.ShapeDtypeStruct(q.shape, jnp.float32), q, k, v, ordered=True), cache

        return params.logits(params(tokens, attend)[0])[0]

    logits, _ = prefill(params, f"quantize:bits={bits},group=4", ROWS, 48)
    for row, own in zip(ROWS, logits, strict=True):
        padded = np.pad(row, (0, 48 - len(row)))[None]  # behind the text
        np.testing.assert_allclose(own, expected(padded)[len(row) - 1], atol=1e-4)
    whole, _ = prefill(params, "full", ROWS, 48)
    assert np.abs(whole - logits).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("bits", part([8, 4], [4]))
def test_the_demo_model_answers(bits: int) -> None:
    """Facts looked up in 512 tokens."""
    params, _ = kvjax.load("demo")
    examples = [example("keys", 512, np.random.default_rng(seed)) for seed in range(12)]
    answers = np.stack([np.append(each.answer, IDS[STOP]) for each in examples])
    prompts = np.stack([each.prompt for each in examples])
    out = kvjax.generate(params, prompts, policy=quantize(bits=bits), max_new_tokens=answers.shape[1])
    assert (out.tokens == answers).all(axis=1).sum() >= 11


@pytest.mark.slow
@pytest.mark.parametrize("policy", [MORPHKV, IN_CACHE], ids=["morphkv", "in_cache"])
def test_a_prompt_in_chunks_has_the_codes_of_one_call(policy: kvjax.Policy) -> None:
    """All codes but the few that float32 rounds the other way."""
    params, entries = decoder(vocab=101), []
    for chunk in (None, 12):
        _, cache = prefill(params, policy, ROWS, 48, chunk=chunk, compress="never")
        in_order = [layer.gather(jnp.argsort(-layer.positions, axis=-1)[..., :48]) for layer in cache.entries]
        entries.append([(x.positions, x.keys.codes, x.values.codes) for x in in_order])
    for whole, chunked in zip(*entries, strict=True):
        np.testing.assert_array_equal(whole[0], chunked[0])
        for x, y in zip(whole[1:], chunked[1:], strict=True):
            off = np.abs(np.asarray(x, int) - np.asarray(y, int))
            assert np.mean(off > 0) < 1e-3
            assert off.max() <= 1 or policy.storage.bits == 4  # there are two codes in these


@pytest.mark.slow
def test_streamed_and_saved_it_answers_as_at_once(tmp_path: Path) -> None:
    params = decoder(vocab=101)
    whole = kvjax.generate(params, ROWS, policy=MORPHKV, max_new_tokens=NEW)
    assert len(np.unique(whole.tokens)) > NEW
    streamed = [piece.tokens for piece in kvjax.stream(params, ROWS, policy=MORPHKV, max_new_tokens=NEW)]
    np.testing.assert_array_equal(np.stack(streamed, axis=1), whole.tokens)
    first = kvjax.generate(params, ROWS, policy=MORPHKV, max_new_tokens=NEW // 2)
    kvjax.save_cache(tmp_path / "cache", first.cache, params)
    cache = kvjax.restore_cache(tmp_path / "cache", params, MORPHKV)
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(first.cache), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    second = kvjax.generate(params, None, cache=cache, max_new_tokens=NEW // 2)
    np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens], axis=1), whole.tokens)


PLAIN = [spec for spec in ALL if parse(spec).storage == full().storage]


# One preset of each method, and positions in the cache, for which keys are rotated as they are read.
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "spec",
    part(PLAIN, [x for x in PLAIN if "in_cache" in x] + [*{x.partition(":")[0]: x for x in PLAIN[::-1]}.values()]),
)
def test_every_policy_can_be_quantised(spec: str) -> None:
    """Traced only: a prompt is read and compressed, a token is decoded, and the entries keep their types."""
    params, policy = decoder_for(spec), quantize(parse(spec), bits=4, group=4)

    def run(tokens: jax.Array) -> tuple[kvjax.KVCache, kvjax.KVCache]:
        cache = kvjax.KVCache.empty(params.config, policy, jnp.full(2, 24), 24, jnp.float32)
        _, cache = kvjax.extend(params, cache, tokens)
        return cache, kvjax.extend(params, cache, tokens[:, :1])[1]

    read, decoded = jax.eval_shape(run, jnp.zeros((2, 24), int))
    assert jax.tree.structure(read) == jax.tree.structure(decoded)
    assert jax.tree.leaves(read) == jax.tree.leaves(decoded)
    leaves = jax.tree.leaves(read.entries, is_leaf=lambda x: isinstance(x, QuantizedArray))
    held = [x for x in leaves if isinstance(x, QuantizedArray)]
    assert len(held) in (2, 2 * params.config.num_layers)  # of the pool, or of each layer
    for x in held:
        assert (x.codes.dtype, x.codes.shape[-1], x.scales.shape[-1]) == (jnp.int8, 4, 2)


@pytest.mark.slow
def test_a_merge_leaves_the_codes_of_unmerged_entries() -> None:
    """KVMerger's recent and heavy entries have the codes of a full cache; its pivots have others."""
    params = decoder(vocab=101)
    _, whole = prefill(params, quantize(full()), ROWS, 48)
    _, merged = prefill(params, quantize(kvmerger(24, recent=8, merge=GaussianMerge(4, None))), ROWS, 48)
    own, other = (np.asarray(x.entries[0].positions) for x in (merged, whole))
    for row, head in np.ndindex(2, 2):  # rows that are longer than the budget
        at = {int(p): i for i, p in enumerate(other[row, head]) if p >= 0}
        held = [(i, at[int(p)]) for i, p in enumerate(own[row, head]) if p >= 0]
        codes, all_codes = (np.asarray(x.entries[0].values.codes[row, head]) for x in (merged, whole))
        equal = [np.array_equal(codes[i], all_codes[j]) for i, j in held]
        assert all(equal[-8:])
        assert 12 <= sum(equal) < len(equal)


def test_decoding_overwrites_the_evicted_slot_and_no_other() -> None:
    params = decoder(vocab=101)
    _, cache = prefill(params, MORPHKV, ROWS, 48)
    for token in RNG.integers(0, 101, (6, 3)):
        _, after = step(params, cache, token, np.ones(3, bool))
        for old, new in zip(cache.entries, after.entries, strict=True):
            same = np.asarray(old.positions == new.positions)
            assert ((~same).sum(axis=-1) == 1).all()
            for x, y in zip(
                jax.tree.leaves((old.keys, old.values)), jax.tree.leaves((new.keys, new.values)), strict=True
            ):
                np.testing.assert_array_equal(np.asarray(x)[same], np.asarray(y)[same])
        cache = after


@pytest.mark.slow
def test_room_is_made_for_codes_and_scales() -> None:
    params, tokens, incoming = decoder(vocab=101), np.array([3, 4, 5]), np.ones(3, bool)
    _, cache = prefill(params, quantize(full(), bits=4), ROWS, 48)
    roomy = kvjax.with_room(cache, 100)
    assert roomy.entries[0].slots >= 44 + 100 > cache.entries[0].slots
    assert roomy.entries[0].values.shape == (3, 2, roomy.entries[0].slots, 8)
    (expected, _), (logits, after) = (step(params, x, tokens, incoming) for x in (cache, roomy))
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert after.entries[0].occupancy.tolist() == [[45, 45], [34, 34], [6, 6]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 16)])
def test_bytes_by_hand(bits: int, group: int | None, dtype: str) -> None:
    """For any dtype: codes, scales of 2 bytes and a position of 4 per slot; a capacity per head."""
    config = replace(decoder().config, head_dim=64, windows=(None, None))
    policy = quantize(streaming_llm(100), bits=bits, group=group)
    planned = kvjax.plan_cache(config, policy, batch=3, length=200, new_tokens=50, dtype=dtype)
    slot = 2 * (64 * bits // 8 + 64 // (group or 32) * 2) + 4
    assert planned.nbytes == 2 * 3 * 2 * (100 * slot + 4)
    assert planned.dtype == dtype


def test_a_pool_of_segments_holds_codes() -> None:
    """A budget that heads compete for saves in every row of the pool the bytes that a slot saves."""
    config = replace(decoder().config, windows=(None, None))
    own = replace(snapkv(24, window=4), budget=GlobalShares(Fixed(24)))
    sizes = {"batch": 3, "length": 60, "new_tokens": 50, "dtype": np.float32}
    whole, planned = (kvjax.plan_cache(config, policy, **sizes) for policy in (own, quantize(own, bits=4, group=4)))
    assert planned.entries.keys.shape == whole.entries.keys.shape
    rows = whole.entries.positions.size
    assert whole.nbytes - planned.nbytes == rows * 2 * (8 * 4 - (8 // 2 + 8 // 4 * 2))


@pytest.mark.slow
def test_a_step_dequantises_one_layer_at_a_time() -> None:
    """The temporaries beside the codes are less than three layers of five."""
    params = decoder(windows=(None,) * 5)
    sizes = {"batch": 2, "length": 512, "new_tokens": 512}
    cache = kvjax.plan_cache(params.config, quantize(full()), dtype=np.float32, **sizes)
    layer = 2 * 2 * 2 * 1024 * 8 * 4
    compiled = jax.jit(one_step, donate_argnums=1).lower(params, cache, cache.pending, np.ones(2, bool)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * layer

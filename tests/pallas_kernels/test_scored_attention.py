"""Scored attention: contexts are those of prompt attention bit by bit, and scores are those of weights in float64."""

import importlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import Reduction, in_one_pass, prompt_attention, scored_attention, use, window_scores
from tests.dense import assert_close, attention, compiled, entries, left_padded
from tests.pallas_kernels.checks import reduced
from tests.products import each_once

blocked = importlib.import_module("kvjax.pallas_kernels.xla.blocked")
REDUCTIONS = tuple(
    Reduction(rows, group, first)
    for rows in ("sum", "max")
    for group in ("sum", "mean", "max", "none")
    for first in ("rows", "group")
)
ONE = (Reduction("sum", "mean", "group"),)
# (B, group, D, new tokens, cached slots, options, dtype)
PROBLEMS = {
    "one token": (2, 4, 8, 1, 7, {}, np.float32),
    "short": (3, 4, 16, 23, 0, {}, np.float32),
    "short over slots": (3, 7, 16, 23, 40, {"window": 9}, np.float32),
    "many heads": (4, 1, 64, 60, 33, {"softcap": 0.8}, np.float32),
    "long": (1, 4, 64, 700, 0, {}, np.float32),
    "long over slots": (2, 4, 16, 300, 530, {"window": 200}, np.float32),
    "whole tiles": (1, 1, 64, 1024, 512, {"softcap": 2.0}, np.float32),
    "bfloat16": (2, 4, 16, 300, 70, {}, jnp.bfloat16),
}


def problem(batch, group, head_dim, new, slots, dtype, heads=2):
    """Rows are full, padded on the left, and, if there is a third, without tokens. Slots are in any order."""
    rng = np.random.default_rng(new + slots)
    lengths, past = [new, (new + 1) // 2, 0, new][:batch], [slots + 20, max(slots // 2, 1), 20, slots + 9][:batch]
    q = rng.normal(size=(batch, heads * group, new, head_dim)).astype(dtype)
    k, v = rng.normal(size=(2, batch, heads, new, head_dim)).astype(dtype)
    t = left_padded(lengths, new, past)
    cached_k, cached_v, cached = entries(rng, batch, heads, slots, past, dtype, head_dim)
    k, v = np.concatenate([cached_k, k], axis=2), np.concatenate([cached_v, v], axis=2)
    p = np.concatenate([cached, np.broadcast_to(t[:, None], (batch, heads, new))], axis=2)
    return q, k, v, t, p


def expected(q, k, t, p, reduction, options):
    weights, _, visible = attention(q, k, t, p, 0.35, **options)
    if reduction.group != "none":
        return reduced(weights, visible, reduction)
    return getattr(weights.reshape(len(q), k.shape[1], -1, *weights.shape[2:]), reduction.rows)(axis=3)


@pytest.mark.long
@pytest.mark.slow(first=4)
@pytest.mark.parametrize(("name", "biased"), each_once(PROBLEMS, [False, True]))
def test_contexts_have_the_bits_of_prompt_attention(name, biased):
    """Whatever is asked for beside them, in programs of their own, with tiles of the default sizes."""
    *sizes, options, dtype = PROBLEMS[name]
    arrays = problem(*sizes, dtype)
    if biased:
        options = options | {"bias": np.random.default_rng(0).normal(size=arrays[-1].shape).astype(np.float32)}
    plain = compiled(prompt_attention, *arrays, scale=0.35, **options)
    for reductions in (ONE, (Reduction("max", "none"), Reduction("sum", "max", "group"))):
        context, lse, scores = compiled(scored_attention, *arrays, scale=0.35, **options, reductions=reductions)
        np.testing.assert_array_equal(np.asarray(context, np.float32), np.asarray(plain[0], np.float32))
        np.testing.assert_array_equal(lse, plain[1])
        for score, reduction in zip(scores, reductions, strict=True):
            again = compiled(
                window_scores, *arrays[:2], *arrays[3:], scale=0.35, **options, lse=lse, reduction=reduction
            )
            assert score.dtype == jnp.float32
            assert_close(score, again)
            if dtype == np.float32:
                assert_close(score, expected(*arrays[:2], *arrays[3:], reduction, options))


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("name", ["short", "short over slots", "long over slots"])
def test_a_score_does_not_depend_on_the_others(name):
    """Alone it has the same bits, so that policies that read a prompt together retain what they retain apart."""
    *sizes, options, dtype = PROBLEMS[name]
    arrays = problem(*sizes, dtype)
    _, _, all_scores = compiled(scored_attention, *arrays, scale=0.35, **options, reductions=REDUCTIONS)
    for score, reduction in zip(all_scores, REDUCTIONS, strict=True):
        assert_close(score, expected(*arrays[:2], *arrays[3:], reduction, options))
    for i in (0, 3, 5, 9, 14):
        _, _, (alone,) = compiled(scored_attention, *arrays, scale=0.35, **options, reductions=REDUCTIONS[i : i + 1])
        np.testing.assert_array_equal(alone, all_scores[i])


@pytest.mark.long
@pytest.mark.slow(first=2)
@pytest.mark.parametrize("name", ["short", "short over slots", "long over slots", "bfloat16"])
def test_what_earlier_keys_received_alone(name):
    """Contexts and the earlier keys' scores have the same bits; the new ones' are 0, unless there are no others."""
    *sizes, options, dtype = PROBLEMS[name]
    arrays, slots = problem(*sizes, dtype), sizes[4]
    of_all, earlier = (
        compiled(scored_attention, *arrays, scale=0.35, **options, reductions=REDUCTIONS, own=own)
        for own in (True, False)
    )
    for one, other in zip(of_all[:2], earlier[:2], strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
    for one, other in zip(of_all[2], earlier[2], strict=True):
        np.testing.assert_array_equal(one[..., : slots or None], other[..., : slots or None])
        assert np.any(one[..., slots:])
        assert np.any(other[..., slots:]) == (slots == 0)


@pytest.mark.long(first=1)
@pytest.mark.parametrize(
    ("new", "slots", "window"), [(1, 0, None), (8, 16, None), (29, 0, 5), (13, 37, None), (40, 5, 14)]
)
def test_tiles_that_overlap_or_are_not_full(monkeypatch, new, slots, window):
    monkeypatch.setattr(blocked, "BLOCK_Q", 8)
    monkeypatch.setattr(blocked, "BLOCK_K", 16)
    monkeypatch.setattr(blocked, "ROWS", 32)
    q, k, v, t, p = problem(3, 4, 8, new, slots, np.float32)
    reductions = (Reduction("sum", "mean"), Reduction("max", "sum", "group"), Reduction("sum", "max", "rows"))
    _, _, scores = compiled(scored_attention, q, k, v, t, p, scale=0.35, window=window, reductions=reductions)
    for score, reduction in zip(scores, reductions, strict=True):
        assert_close(score, expected(q, k, t, p, reduction, {"window": window}))
        assert not np.any(score[2]), "a row without queries scores 0"


def test_huge_logits_of_any_sign_and_biases_of_minus_infinity():
    """A query may see only entries that are far below its largest logit so far, or nothing at all."""
    q, k, v, t, p = problem(2, 2, 8, 30, 600, np.float32)
    q, k = 64 * np.round(2 * q), 64 * np.round(2 * k)
    bias = np.zeros(p.shape, np.float32)
    bias[0, :, :520] = -np.inf
    bias[1] = -np.inf
    _, lse, (score,) = compiled(scored_attention, q, k, v, t, p, scale=0.35, bias=bias, reductions=ONE)
    assert np.abs(lse[np.isfinite(lse)]).max() > 1e4
    assert_close(score, expected(q, k, t, p, ONE[0], {"bias": bias}), 1e-3, 2e-3)
    assert not np.any(score[1])


def test_temporary_memory_grows_with_the_prompt_and_not_with_its_square():
    """The exponentials of one block of queries and one kv head are kept, beside arrays of the size of the arguments."""

    def temporaries(tokens):
        shapes = [(1, 8, tokens, 64), (1, 2, tokens, 64), (1, 2, tokens, 64)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        places = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, tokens), (1, 2, tokens))]
        call = jax.jit(partial(scored_attention, scale=0.125, reductions=ONE))
        return call.lower(*arrays, *places).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(8192), temporaries(32_768)
    kept = 4 * blocked.BLOCK_Q * 4 * 32_768  # bytes: query heads of a kv head, queries, float32, keys
    assert long < kept + 4 * 32_768 * 64 * 8 * 4
    assert long < 4.2 * short


def test_kernels_and_means_over_queries_take_a_second_pass():
    assert in_one_pass(ONE[0])
    assert not in_one_pass(Reduction("mean", "sum"))
    with use("triton-interpret"):
        assert not in_one_pass(ONE[0])
    for choice in ("xla", "reference"):
        with use(choice):
            assert in_one_pass(ONE[0])

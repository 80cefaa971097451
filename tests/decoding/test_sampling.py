"""Samplers against literal NumPy definitions, against transformers (needs torch), and as random draws."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.decoding.sampling import (
    Greedy,
    Sampler,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    log_probability,
    mark_seen,
    most_probable,
    parse,
)

V = 97


def random_logits(rows: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, V)) * 3).astype(np.float32)


def softmax(row: np.ndarray) -> np.ndarray:
    exponentials = np.exp(row.astype(np.float64) - row.max())
    return exponentials / exponentials.sum()


def literal_top_k(row: np.ndarray, k: int) -> set[int]:
    return {i for i, x in enumerate(row) if np.sum(row > x) < k}


def literal_top_p(row: np.ndarray, p: float) -> set[int]:
    probabilities = softmax(row)
    return {i for i, x in enumerate(row) if probabilities[row > x].sum() < p}


def literal_min_p(row: np.ndarray, p: float) -> set[int]:
    probabilities = softmax(row)
    return {i for i, x in enumerate(probabilities) if x >= p * probabilities.max()}


def kept(logits: jax.Array) -> list[set[int]]:
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in np.asarray(logits)]


@pytest.mark.parametrize(
    ("keep", "literal", "thresholds"),
    [
        (keep_top_k, literal_top_k, [1, 2, 40, V, 1000]),
        (keep_top_p, literal_top_p, [1e-6, 0.3, 0.9, 0.999, 1 - 1e-6]),
        (lambda logits, p: keep_min_p(logits, np.log(p) if p else -np.inf), literal_min_p, [0.0, 1e-4, 0.1, 0.7, 1.0]),
    ],
)
def test_filters_keep_the_defined_set(keep, literal, thresholds):
    logits = random_logits(6)
    for threshold in thresholds:
        filtered = keep(jnp.asarray(logits), threshold)
        assert kept(filtered) == [literal(row, threshold) for row in logits]
        np.testing.assert_array_equal(np.where(np.isfinite(filtered), filtered, logits), logits)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(row=st.lists(st.integers(-6, 6), min_size=1, max_size=12), p=st.sampled_from([0.05, 0.37, 0.62, 0.93]))
def test_tied_tokens_are_treated_alike_and_one_remains(row, p):
    logits = jnp.asarray([row], jnp.float32)
    for filtered in (keep_top_k(logits, 3), keep_top_p(logits, p), keep_min_p(logits, np.log(p))):
        remaining = kept(filtered)[0]
        assert int(np.argmax(row)) in remaining
        assert remaining == {i for i, x in enumerate(row) if x in {row[j] for j in remaining}}


def test_top_p_applies_to_the_tokens_that_top_k_kept():
    # top_k=2 keeps 0.5 and 0.3, renormalised to 0.625 and 0.375, so the first token alone reaches 0.6.
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.1, 0.1]]))
    assert kept(Sampler(top_p=0.6).filtered(logits)) == [{0, 1}]
    assert kept(Sampler(top_p=0.6, top_k=2).filtered(logits)) == [{0}]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_most_probable_token_is_the_first_of_equal_ones(dtype):
    logits = np.tile(random_logits(7), 50)  # each number is there fifty times
    logits[1] = -np.inf
    logits[2, 40:60] = np.inf
    logits[3, [300, 200]] = np.nan
    logits[4] = np.nan
    logits[5] = -0.0
    logits[5, 9] = 0.0  # equal to the others
    logits = jnp.asarray(logits, dtype)
    for function in (most_probable, jax.jit(most_probable)):
        tokens = function(logits)
        assert tokens.dtype == jnp.int32
        assert tokens.tolist() == [*np.argmax(np.asarray(logits[:5], np.float32), axis=1), 0, int(np.argmax(logits[6]))]


def test_temperature_acts_before_the_filters():
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.2]]))
    assert kept(Sampler(min_p=0.5).filtered(logits)) == [{0, 1}]
    assert kept(Sampler(min_p=0.5, temperature=0.5).filtered(logits)) == [{0}]
    assert kept(Sampler(min_p=0.5, temperature=2.0).filtered(logits)) == [{0, 1, 2}]


def test_repetition_penalty_acts_on_seen_tokens_alone():
    logits = jnp.asarray([[2.0, -2.0, 1.9, -1.0], [2.0, -2.0, 1.9, -1.0]])
    seen = jnp.asarray([[True, True, False, False], [False, False, True, False]])
    expected = [[1.0, -4.0, 1.9, -1.0], [2.0, -2.0, 0.95, -1.0]]
    np.testing.assert_allclose(Greedy(repetition_penalty=2.0).penalized(logits, seen), expected)
    assert Greedy(repetition_penalty=2.0)(logits, seen=seen).tolist() == [2, 0]
    assert Greedy()(logits).tolist() == [0, 0]


def test_a_vanishing_temperature_is_greedy():
    logits = jnp.asarray(random_logits(5)) * 1e3
    keys = jax.random.split(jax.random.key(0), 5)
    for sampler in (Sampler(1e-30), Sampler(1e-30, top_k=50, top_p=0.9, min_p=0.1), Sampler(top_k=1)):
        np.testing.assert_array_equal(jax.jit(sampler.__call__)(logits, keys), Greedy()(logits))


@pytest.mark.long
def test_draws_follow_the_filtered_distribution():
    draws = 40_000
    logits = jnp.asarray([[1.0, 0.2, -0.5, 0.9, -3.0, 0.0]])
    sampler = Sampler(temperature=0.8, top_k=5, top_p=0.95, min_p=0.05)
    keys = jax.random.split(jax.random.key(3), draws)
    tokens = np.asarray(sampler(jnp.broadcast_to(logits, (draws, 6)), keys))
    expected = softmax(np.asarray(sampler.filtered(logits))[0])
    counts = np.bincount(tokens, minlength=6)
    assert 2 <= np.count_nonzero(expected) < 6
    assert counts[expected == 0].sum() == 0
    deviation = np.sqrt(draws * expected * (1 - expected))
    assert np.all(np.abs(counts - draws * expected) <= 4 * deviation)


@pytest.mark.long
def test_a_draw_depends_on_the_rows_own_key_only():
    logits, keys = jnp.asarray(random_logits(8)), jax.random.split(jax.random.key(1), 8)
    seen = jnp.asarray(np.random.default_rng(2).random((8, V)) < 0.2)
    sampler = Sampler(temperature=1.3, top_k=60, top_p=0.97, min_p=0.001, repetition_penalty=1.2)
    together = sampler(logits, keys, seen)
    assert together.dtype == jnp.int32
    alone = [int(sampler(logits[i : i + 1], keys[i : i + 1], seen[i : i + 1])[0]) for i in range(8)]
    assert together.tolist() == alone
    np.testing.assert_array_equal(sampler(logits[::-1], keys[::-1], seen[::-1]), together[::-1])
    other = sampler(logits, jax.random.split(jax.random.key(2), 8), seen)
    assert together.tolist() != other.tolist()


def test_equal_samplers_share_one_compilation():
    traces = []

    @partial(jax.jit, static_argnums=0)
    def draw(sampler, logits, keys):
        traces.append(sampler)
        return sampler(logits, keys)

    logits, keys = jnp.asarray(random_logits(2)), jax.random.split(jax.random.key(0), 2)
    first = draw(Sampler(0.7, top_p=0.9), logits, keys)
    np.testing.assert_array_equal(draw(parse("top_p=0.9,temperature=0.7"), logits, keys), first)
    draw(Sampler(0.7, top_p=0.8), logits, keys)
    assert len(traces) == 2


def test_log_probability_is_the_models_own():
    logits, tokens = random_logits(4), np.asarray([0, 5, 96, 41])
    expected = [np.log(softmax(row)[token]) for row, token in zip(logits, tokens, strict=True)]
    np.testing.assert_allclose(log_probability(jnp.asarray(logits), jnp.asarray(tokens)), expected, rtol=1e-5)


def test_mark_seen_ignores_padding():
    tokens, valid = jnp.asarray([[3, 1, 0], [0, 2, 2]]), jnp.asarray([[True, True, False], [False, True, True]])
    seen = mark_seen(jnp.zeros((2, 4), bool).at[1, 3].set(True), tokens, valid)
    assert seen.tolist() == [[False, True, False, True], [False, False, True, True]]


def test_required_arguments():
    logits, keys = jnp.zeros((1, 4)), jax.random.split(jax.random.key(0), 1)
    assert Sampler(repetition_penalty=1.1).needs_seen
    assert Greedy(repetition_penalty=1.1).needs_seen
    assert not Sampler(repetition_penalty=1.0).needs_seen
    assert not Greedy().needs_seen
    with pytest.raises(ValueError, match=r"seen=None: .* requires the mask"):
        Sampler(repetition_penalty=1.1)(logits, keys)
    with pytest.raises(ValueError, match=r"keys=None: .* requires one PRNG key per row"):
        Sampler()(logits)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [0, -1.0, float("nan"), float("inf"), "1", None, True]),
        ("top_k", [0, -3, 2.5, "4"]),
        ("top_p", [0.0, -0.1, 1.1, float("nan")]),
        ("min_p", [-0.1, 1.1, "x"]),
        ("repetition_penalty", [0.0, -1.0, float("inf")]),
    ],
)
def test_settings_out_of_range_are_named(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}=.*: expected "):
            Sampler(**{name: value})


def test_parse():
    assert parse("greedy") == Greedy()
    assert parse("greedy, repetition_penalty=1.2") == Greedy(repetition_penalty=1.2)
    text = "temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1"
    assert parse(text) == Sampler(0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "accepted: 'greedy' or NAME=NUMBER"),
        ("beam", "'beam' in sampler 'beam' is not understood"),
        ("greedy,top_k=3", "'top_k=3' in .* accepted: 'greedy' or NAME=NUMBER of repetition_penalty"),
        ("top_p=0.9,greedy", "'greedy' in .* is not understood"),
        ("top_p=0.9,top_p=0.8", "is given twice"),
        ("top_k=3.5", "top_k='3.5' .*: expected an integer"),
        ("temperature=hot", "temperature='hot' .*: expected a number"),
        ("temperature=0", "expected a number > 0"),
    ],
)
def test_parse_errors(text, fault):
    with pytest.raises(ValueError, match=fault):
        parse(text)


@pytest.mark.parity
@pytest.mark.parametrize(
    "text",
    [
        "temperature=0.6",
        "top_k=10",
        "top_p=0.8",
        "min_p=0.1",
        "repetition_penalty=1.3",
        "temperature=1.4,top_k=30,top_p=0.9,min_p=0.02,repetition_penalty=0.8",
        "temperature=0.3,top_k=1000,top_p=0.01,min_p=1.0,repetition_penalty=2.0",
    ],
)
def test_same_distribution_as_transformers(text):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    sampler, logits = parse(text), random_logits(16, seed=7)
    assert isinstance(sampler, Sampler)
    ids = np.random.default_rng(8).integers(0, V, size=(16, 20))
    processors = hf.LogitsProcessorList()
    if sampler.repetition_penalty is not None:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(sampler.repetition_penalty))
    processors.append(hf.TemperatureLogitsWarper(sampler.temperature))
    if sampler.top_k is not None:
        processors.append(hf.TopKLogitsWarper(sampler.top_k))
    if sampler.top_p is not None:
        processors.append(hf.TopPLogitsWarper(sampler.top_p))
    if sampler.min_p is not None:
        processors.append(hf.MinPLogitsWarper(sampler.min_p))
    theirs = torch.softmax(processors(torch.from_numpy(ids), torch.from_numpy(logits)), dim=-1).numpy()

    seen = mark_seen(jnp.zeros((16, V), bool), jnp.asarray(ids), jnp.ones((16, 20), bool))
    ours = np.asarray(jax.nn.softmax(sampler.filtered(jnp.asarray(logits), seen), axis=-1))
    np.testing.assert_array_equal(ours > 0, theirs > 0)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-7)

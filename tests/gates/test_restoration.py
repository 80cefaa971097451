"""Training RestoreKV: the divergence of answers that is minimised, in NumPy, and that it falls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.files.texts import Stream
from kvjax.gates.objective import Recipe
from kvjax.gates.restoration import restoration
from kvjax.gates.training import train
from tests import tiny
from tests.methods.learned_rows import logits_behind, sequence

N, QUESTION, ANSWER, TOKENS, BASE = 16, 3, 4, 3, "knorm:budget=6"
PARAMS = tiny.decoder(4, 2, (None, None))
STREAM = Stream(np.random.default_rng(0).permutation(tiny.VOCAB).astype(np.int32), ends=(20, 33))


def objective(steps: int = 1, rate: float = 1e-3, **options: Any) -> Any:
    options = {"question": QUESTION, "answer": ANSWER, "base": BASE} | options
    return restoration(PARAMS, Recipe(steps, 2, N, rate), STREAM, None, tokens=TOKENS, rank=2, **options)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


@pytest.mark.long
def test_the_base_leaves_room_for_learned_tokens() -> None:
    """A batch has what the base retains of contexts with fewer entries, and answers from the complete cache."""
    text, lengths, retained = objective().batch(0)
    assert lengths.tolist() == [ANSWER, ANSWER]
    np.testing.assert_array_equal(text[:, N:], kvjax.generate(PARAMS, text[:, :N], max_new_tokens=ANSWER).tokens)
    alone = kvjax.prefill(PARAMS, text[:, : N - QUESTION], policy=f"knorm:budget={6 - TOKENS}")
    np.testing.assert_array_equal(retained, alone.retained_mask())


def test_the_loss_is_the_divergence_of_answers() -> None:
    made, gates = objective(), tiny.learned_tokens(PARAMS.config, TOKENS, "restorekv")
    text, _, retained = made.batch(0)
    counts, found = np.array([ANSWER, 2]), []  # the second answer ends early
    context = N - QUESTION
    for row, n, held in zip(text, counts, retained, strict=True):
        rows = sequence(PARAMS, gates, row[:context], TOKENS)
        learned = list(range(context, context + TOKENS))
        kept = [[np.flatnonzero(head).tolist() + learned for head in layer] for layer in held]
        whole = [[list(range(context)) for _ in layer] for layer in held]
        behind = slice(QUESTION - 1, QUESTION - 1 + n)
        q = log_softmax(logits_behind(PARAMS, rows, kept, row[context:]))[behind]
        alone = sequence(PARAMS, gates, row[:context], 0)
        p = log_softmax(logits_behind(PARAMS, alone, whole, row[context:]))[behind]
        found += (np.exp(p) * (p - q)).sum(axis=-1).tolist()
    loss = made.loss(jax.tree.map(jnp.asarray, gates.layers), PARAMS, (text, counts, retained))
    np.testing.assert_allclose(loss, np.mean(found), rtol=1e-4)


@pytest.mark.slow
def test_the_divergence_falls(tmp_path: Any) -> None:
    made = objective(steps=60, rate=0.02)
    first, batch = made.initial(), made.batch(0)
    gates = train(PARAMS, made, Recipe(60, 2, N, 0.02), tmp_path / "out", facts={})
    assert made.loss(jax.tree.map(jnp.asarray, gates.layers), PARAMS, batch) < 0.5 * made.loss(first, PARAMS, batch)
    policy = f"restorekv:base=knorm,base.budget=6,tokens={TOKENS}"
    assert kvjax.prefill(kvjax.with_gates(PARAMS, tmp_path / "out"), batch[0][:, :N], policy=policy).filled


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="question=16 with length=16: expected fewer tokens than a text has"):
        objective(question=16)
    with pytest.raises(ValueError, match="base=knorm:budget=64 retains every entry of 13 tokens: expected a smaller"):
        objective(base="knorm:budget=64")
    with pytest.raises(ValueError, match="merges entries, which training does not: expected a policy that drops them"):
        objective(base="merging:base=knorm,base.budget=6")

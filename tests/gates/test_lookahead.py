"""Training LookaheadKV: the importance that is matched, in NumPy, and what training of a small model achieves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.files.texts import Stream
from kvjax.gates.lookahead import divergence
from kvjax.gates.objective import Recipe
from kvjax.gates.training import train
from tests import tiny
from tests.methods.reference import Reader
from tests.methods.test_lookaheadkv import attention_rows

N, ANSWER, TOKENS = 13, 4, 3
PARAMS = tiny.decoder(4, 2, (None, None))
STREAM = Stream(np.random.default_rng(0).permutation(tiny.VOCAB).astype(np.int32), ends=(20, 33))


def objective(steps: int = 1, rate: float = 1e-3) -> Any:
    return divergence(PARAMS, Recipe(steps, 2, N, rate), STREAM, None, tokens=TOKENS, rank=2, answer=ANSWER)


def shares(weights: np.ndarray) -> np.ndarray:
    """The mean over queries of weights [Hq, W, N], divided by its sum."""
    mean = weights.mean(axis=1)
    return mean / mean.sum(axis=-1, keepdims=True)


def test_prompts_end_where_texts_end_and_the_model_answers_them() -> None:
    text, lengths = objective().batch(0)
    assert lengths.tolist() == [ANSWER, ANSWER]
    for row in text:
        assert any((row[:N] == STREAM.tokens[end - N : end]).all() for end in STREAM.ends)
    answers = kvjax.generate(PARAMS, text[:, :N], max_new_tokens=ANSWER).tokens
    np.testing.assert_array_equal(text[:, N:], answers)


@pytest.mark.slow
def test_the_loss_is_the_divergence_of_importances() -> None:
    """Against attention rows of whole sequences, with random learned tokens and adapters."""
    made = objective()
    gates = tiny.learned_tokens(PARAMS.config, TOKENS)
    text, lengths = made.batch(0)[0], np.array([ANSWER, 2])  # the second answer ends early
    found = []
    for row, n in zip(text, lengths, strict=True):
        reader = Reader(PARAMS)
        reader.read(row)
        answer = reader.weights(range(N, N + n), range(N))  # [L, H, G, W, N]
        lookahead = attention_rows(PARAMS, gates, row[:N], TOKENS)
        for own, ahead in zip(answer, lookahead, strict=True):
            t, s = shares(own.reshape(-1, n, N)), shares(ahead)
            found.append((t * np.log(t / s)).sum(axis=-1).mean())
    loss = made.loss(jax.tree.map(jnp.asarray, gates.layers), PARAMS, (text, lengths))
    np.testing.assert_allclose(loss, np.mean(found), rtol=1e-4)


@pytest.mark.slow
def test_the_divergence_falls(tmp_path: Any) -> None:
    """Training begins with adapters that change nothing; the gates are those of a policy."""
    made = objective(steps=60, rate=0.02)
    first, batch = made.initial(), made.batch(0)
    assert all(not layer[name].any() for layer in first for name in layer if "lora_B" in name)
    gates = train(PARAMS, made, Recipe(60, 2, N, 0.02), tmp_path / "out", facts={})
    assert made.loss(jax.tree.map(jnp.asarray, gates.layers), PARAMS, batch) < 0.5 * made.loss(first, PARAMS, batch)
    policy = f"lookaheadkv:budget=6,tokens={TOKENS},recent=2"
    assert kvjax.prefill(kvjax.with_gates(PARAMS, tmp_path / "out"), batch[0][:, :N], policy=policy).filled

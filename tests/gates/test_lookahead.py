"""Training LookaheadKV: the importance that is matched, in NumPy, and what training of a small model achieves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.evaluation.tasks.demo import example
from kvjax.files.texts import Stream
from kvjax.gates.files import Gates
from kvjax.gates.lookahead import divergence
from kvjax.gates.objective import Recipe
from kvjax.gates.training import train
from tests import tiny
from tests.methods.learned_rows import sequence
from tests.methods.reference import Reader

N, ANSWER, TOKENS, LENGTH = 13, 4, 3, 128
PARAMS = tiny.decoder(4, 2, (None, None))
STREAM = Stream(np.random.default_rng(0).permutation(tiny.VOCAB).astype(np.int32), ends=(20, 33))


def objective(steps: int = 1, rate: float = 1e-3) -> Any:
    return divergence(PARAMS, Recipe(steps, 2, N, rate), STREAM, None, tokens=TOKENS, rank=2, answer=ANSWER)


def shares(weights: np.ndarray) -> np.ndarray:
    """The mean over queries of weights [Hq, W, N], divided by its sum."""
    mean = weights.mean(axis=1)
    return mean / mean.sum(axis=-1, keepdims=True)


@pytest.mark.long
def test_prompts_end_where_texts_end_and_the_model_answers_them() -> None:
    text, lengths = objective().batch(0)
    assert lengths.tolist() == [ANSWER, ANSWER]
    for row in text:
        assert any((row[:N] == STREAM.tokens[end - N : end]).all() for end in STREAM.ends)
    answers = kvjax.generate(PARAMS, text[:, :N], max_new_tokens=ANSWER).tokens
    np.testing.assert_array_equal(text[:, N:], answers)


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
        lookahead = [rows.weights[..., :N] for rows in sequence(PARAMS, gates, row[:N], TOKENS)]
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


@pytest.mark.slow
def test_trained_scores_find_what_answers_attend_to(tmp_path: Any) -> None:
    """On the demo model, of prompts that training has not seen: better than before training, and than SnapKV."""
    params, _ = kvjax.load("demo")
    count, recent = 8, 8
    seen, others = ([prompt(seed, i) for i in range(n)] for seed, n in ((1, 60), (2, 6)))
    stream = Stream(np.concatenate(seen), ends=tuple(np.cumsum([len(text) for text in seen]).tolist()))
    recipe = Recipe(steps=100, batch=4, length=LENGTH, learning_rate=0.005)
    made = divergence(params, recipe, stream, None, tokens=count, rank=8, answer=8)
    trained = train(params, made, recipe, tmp_path / "out", facts={})
    first = Gates("lookaheadkv", made.sizes, jax.tree.map(np.asarray, made.initial()))
    spec = f"lookaheadkv:budget=24,tokens={count},recent={recent}"
    wanted = [important(params, row, 24 - recent, recent) for row in others]

    def found(params: Any, spec: str) -> float:
        """The share of the most important entries that is retained."""
        cache, shares = kvjax.prefill(params, others, policy=spec), []
        for b, layers in enumerate(wanted):
            for own, heads in zip(layers, tiny.held(cache, b), strict=True):
                shares += [len({*best} & {*held}) / len(best) for best, held in zip(own, heads, strict=True)]
        return float(np.mean(shares))

    after, before = (found(kvjax.with_gates(params, gates), spec) for gates in (trained, first))
    assert after > before + 0.1
    assert after > found(params, f"snapkv:budget=24,window={recent},pool=none") + 0.1


def prompt(seed: int, i: int) -> np.ndarray:
    """A text of the demo model's tasks with a question at its end."""
    task = ("needle", "needles", "keys")[i % 3]
    return np.asarray(example(task, LENGTH, np.random.default_rng([seed, i])).prompt, np.int32)


def important(params: Any, row: np.ndarray, count: int, recent: int) -> list[Any]:
    """The `count` entries, of all but the last ones, that the answer attends to most, [L][H]."""
    answer = kvjax.generate(params, row[None], max_new_tokens=8).tokens[0]
    answer = answer[answer >= 0]
    reader, n = Reader(params, theta=params.config.rope.theta), len(row)
    reader.read(np.concatenate([row, answer]))
    mean = reader.weights(range(n, n + len(answer)), range(n - recent)).mean(axis=(2, 3))
    return np.argsort(-mean, axis=-1)[..., :count].tolist()

"""DuoAttention's training: attention that gates mix, by NumPy with every query for itself, and what is minimised."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attend.causal import causal
from kvjax.evaluation.tasks.vocabulary import WORDS, tokenizer
from kvjax.files.texts import Stream
from kvjax.gates.methods import TRAININGS
from kvjax.gates.mixing import distillation, mixed
from kvjax.gates.objective import Recipe
from kvjax.gates.training import train
from kvjax.models import AttentionLayer, Rope, rotate
from tests import dense, tiny
from tests.dense import assert_close

RNG = np.random.default_rng(3)
B, H, G, N, D = 2, 3, 2, 40, 8
SINKS, RECENT = 3, 7
GATES = jnp.array([[0.5, 0.5, 0.5], [1.0, 0.0, 0.3]])
AT = jnp.broadcast_to(jnp.arange(N), (B, N))
LAYER = AttentionLayer(1, Rope(1e4), None, 0.4, jnp.zeros((H * G, D, 1)))
LENGTH = 400
PARAMS = tiny.decoder(windows=(None, None), vocab=len(WORDS))
STREAM = Stream(RNG.integers(2, len(WORDS), 2000).astype(np.int32))


def attended(layer: AttentionLayer, q: np.ndarray, k: np.ndarray, v: np.ndarray, streaming: bool) -> np.ndarray:
    """Contexts [B, Hq, N, D]: each query is given the keys that it sees."""
    at = np.broadcast_to(np.arange(N), (B, N))
    q, k = (np.asarray(rotate(x, at[:, None], layer.rope.frequencies(D)), np.float64) for x in (q, k))
    found = np.zeros(q.shape)
    for n in range(N):
        seen = [s for s in range(n + 1) if not streaming or s < SINKS or s > n - RECENT]
        weights, _, _ = dense.attention(
            q[:, :, [n]],
            k[:, :, seen],
            at[:, [n]],
            np.broadcast_to(at[:, None, seen], (B, H, len(seen))),
            layer.scale,
            layer.window,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )
        found[:, :, [n]] = dense.context(weights, v[:, :, seen])
    return found


@pytest.mark.parametrize(
    "features", [{}, {"window": 16}, {"window": 5}, {"softcap": 2.0}, {"sinks": jnp.linspace(-1, 2, H * G)}], ids=str
)
def test_gates_mix_full_and_streaming_attention(features: dict) -> None:
    layer = replace(LAYER, **features)
    q, k, v = (RNG.normal(size=(B, heads, N, D)).astype(np.float32) for heads in (H * G, H, H))
    found, _ = jax.jit(lambda *x: mixed(GATES, AT, SINKS, RECENT)(layer, *x, None))(q, k, v)
    gates = np.repeat(np.asarray(GATES[1], np.float64), G)[:, None, None]
    expected = gates * attended(layer, q, k, v, False) + (1 - gates) * attended(layer, q, k, v, True)
    assert_close(found, expected)


def test_bfloat16() -> None:
    q, k, v = (jnp.asarray(RNG.normal(size=(B, heads, N, D)), jnp.bfloat16) for heads in (H * G, H, H))
    attend = mixed(GATES, AT, SINKS, RECENT)
    attended = jax.jit(lambda *streams: attend(LAYER, *streams, None)[0])
    found, exact = (attended(*(x.astype(dtype) for x in (q, k, v))) for dtype in ("bfloat16", "float32"))
    assert found.dtype == jnp.bfloat16
    assert_close(found.astype(jnp.float32), exact, typical=0.03, worst=0.06)


def test_gates_of_one_give_the_model() -> None:
    params = tiny.decoder(windows=(None, 12))
    tokens = RNG.integers(0, tiny.VOCAB, (B, N))
    own, gated = (
        jax.jit(lambda params, attend=attend: params(tokens, attend)[0])(params)
        for attend in (causal(AT), mixed(jnp.ones((2, 2)), AT, SINKS, RECENT))
    )
    assert_close(gated, own)


def objective(steps: int = 1, seed: int = 0, **options: int):
    recipe = Recipe(steps, 2, LENGTH, TRAININGS["duo_attention"].learning_rate, seed)
    return recipe, distillation(PARAMS, recipe, STREAM, tokenizer(), **options)


def test_the_loss_counts_the_states_before_answers() -> None:
    _, goal = objective(sinks=SINKS, recent=RECENT)
    tokens, recited = goal.batch(3)
    weights = tuple({"gates": jnp.array(row, jnp.float32)} for row in [[0.1, 0.9], [0.0, 0.5]])
    gates, at = jnp.stack([layer["gates"] for layer in weights]), jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)

    @jax.jit
    def states(params):
        return [params.norm(params(tokens, attend)[0]) for attend in (mixed(gates, at, SINKS, RECENT), causal(at))]

    found, wanted = (np.asarray(x, np.float64) for x in states(PARAMS))
    apart = [(found[b, n] - wanted[b, n]) ** 2 for b in range(2) for n in range(LENGTH - 1) if recited[b, n + 1]]
    assert len(apart) == 2 * 40  # ten answers of four words
    np.testing.assert_allclose(goal.loss(weights, PARAMS, (tokens, recited)), np.mean(apart) + 0.05 * 0.375, rtol=1e-4)
    assert np.mean(apart) > 1e-5
    ones = goal.initial()
    np.testing.assert_allclose(goal.loss(ones, PARAMS, (tokens, recited)), 0.05, rtol=1e-5)
    held = goal.bounded(({"gates": jnp.array([-0.1, 1.2])}, {"gates": jnp.array([0.4, 1.0])}))
    np.testing.assert_allclose([layer["gates"] for layer in held], [[0, 1], [0.4, 1]])


def test_batches_follow_from_seed_and_step() -> None:
    first, again, other = (objective(seed=seed, sinks=2, recent=4)[1] for seed in (0, 0, 1))
    for mine, same in zip(first.batch(5), again.batch(5), strict=True):
        np.testing.assert_array_equal(mine, same)
    assert (first.batch(5)[0] != first.batch(6)[0]).any()
    assert (first.batch(5)[0] != other.batch(5)[0]).any()
    assert first.settings == {"sinks": 2, "recent": 4}


@pytest.mark.slow
def test_trained_gates_are_better_than_equal_ones(tmp_path) -> None:
    """On one text: gates of all heads that are alike have a larger loss, at 0, at 1 and at the same mean."""
    recipe, goal = objective(steps=60, sinks=SINKS, recent=RECENT)
    batch = goal.batch(0)
    params = jax.tree.map(lambda x: 0.5 * x, PARAMS)  # with weights for which a gate between 0 and 1 is best
    gates = train(params, replace(goal, batch=lambda step: batch), recipe, tmp_path / "out", facts={})
    mean = np.mean([layer["gates"] for layer in gates.layers])
    loss = jax.jit(goal.loss)
    alike = [tuple({"gates": jnp.full(2, gate, jnp.float32)} for _ in range(2)) for gate in (0, mean, 1)]
    assert loss(gates.layers, params, batch) < 0.995 * min(loss(weights, params, batch) for weights in alike)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sinks": 300, "recent": 100}, "length=400 with sinks=300 and recent=100: expected more tokens than sinks"),
        ({"length": 379}, "length=379: expected 380 or more, twice the tokens of 10 pass keys and their recital"),
    ],
)
def test_short_texts_are_refused(options: dict, says: str) -> None:
    length = options.pop("length", LENGTH)
    with pytest.raises(ValueError, match=says):
        distillation(PARAMS, Recipe(1, 1, length, 0.02), STREAM, tokenizer(), **{"sinks": 2, "recent": 4, **options})

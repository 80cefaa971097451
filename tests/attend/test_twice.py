"""A decode step whose rows run through the decoder twice, as on GPUs, is the step of other devices."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attend import runs_twice
from kvjax.attend.twice import attending_once, in_array
from kvjax.models import AttentionLayer, Mixture, Rope
from kvjax.reading.layers import step
from tests.tiny import VOCAB, decoder


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize(("batch", "mixture"), [(1, None), (3, None), (1, Mixture(4, 2, 24))])
def test_rows_that_run_twice(batch: int, mixture: Mixture | None, monkeypatch: pytest.MonkeyPatch) -> None:
    params, rng = decoder(mixture=mixture), np.random.default_rng(0)
    cache = kvjax.prefill(params, list(rng.integers(0, VOCAB, (batch, 9))), policy="morphkv:budget=8,window=4")
    tokens, incoming = jnp.asarray(rng.integers(0, VOCAB, batch)), jnp.arange(batch) != 1
    expected = jax.jit(step)(params, cache, tokens, incoming)
    asked: list[tuple[int, None]] = []

    def always(*sizes) -> bool:
        asked.append(sizes)
        return True

    monkeypatch.setattr(import_module("kvjax.reading.layers"), "runs_twice", always)
    got = jax.jit(lambda *args: step(*args))(params, cache, tokens, incoming)
    assert asked == [(batch, None)]
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_row_that_runs_twice_attends_once() -> None:
    """Of three rows: attention sees one of each two, and its context goes to both."""
    layer = AttentionLayer(0, Rope(1e4), None, 1.0, jnp.zeros((2, 4, 1)), hidden=jnp.arange(6.0).reshape(6, 1, 1))
    q, k = jnp.arange(48.0).reshape(6, 2, 1, 4), -jnp.arange(24.0).reshape(6, 1, 1, 4)

    def attend(layer: Any, q: Any, k: Any, v: Any, entries: Any) -> tuple[Any, Any]:
        return q + k + v + layer.hidden[..., None], (entries, layer.residual)

    context, found = attending_once(attend)(layer, q, k, 2 * k, "entries")
    own = q[::2] + 3 * k[::2] + jnp.arange(0.0, 6, 2)[:, None, None, None]
    np.testing.assert_array_equal(context, np.repeat(own, 2, axis=0))
    assert found == ("entries", None)


def test_a_single_number_of_a_gpu_is_in_an_array() -> None:
    lowered = jax.jit(in_array).trace(jnp.ones(1, jnp.int32)).lower(lowering_platforms=("cuda",)).as_text()
    assert "optimization_barrier" in lowered
    assert "tensor<2xi32>" in lowered
    for x in (jnp.array([5]), jnp.array([False]), jnp.arange(3)):
        np.testing.assert_array_equal(jax.jit(in_array)(x), x)


def test_only_gpus_of_one_row_run_rows_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not runs_twice(1, None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert runs_twice(1, None)
    assert not runs_twice(2, None)

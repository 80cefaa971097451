"""A decode step whose rows run through the decoder twice, as on GPUs, is the step of other devices."""

from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attend import runs_twice
from kvjax.attend.twice import in_array
from kvjax.models import Mixture
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

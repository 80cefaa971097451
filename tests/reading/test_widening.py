"""Layers whose budgets differ share the program of a layer, and retain what they would retain with their own."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest

import kvjax
from kvjax.reading.widening import Widths
from tests.tiny import VOCAB, decoder

ROWS = [np.random.default_rng(b).integers(0, VOCAB, n) for b, n in enumerate((90, 61, 7))]
TURN = [[5, 6, 7], [8, 9, 10], [9, 10, 11]]
LAYERS = 5
PYRAMID = "pyramidkv:budget=24,window=4"
EACH = "shares=(1.5,0.5,1.0,0.75,1.25)"
SHARES = f"per_layer:base=morphkv,base.window=4,base.budget=16,{EACH}"
SIZED = f"per_layer:base=chunkkv,base.length=4,base.base=snapkv,base.base.budget=16,base.base.window=4,{EACH}"


def both(policy: str, chunk: int | None) -> list[kvjax.KVCache]:
    """The cache of a prompt, and that of a later turn."""
    params = decoder(windows=(None,) * LAYERS)
    cache = kvjax.prefill(params, ROWS, policy=policy, chunk=chunk)
    return [cache, kvjax.prefill(params, TURN, cache=cache)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "chunk"),
    [
        (PYRAMID, None),
        pytest.param(PYRAMID, 16, marks=pytest.mark.slow),
        pytest.param(SHARES, None, marks=pytest.mark.slow),
    ],
)
def test_layers_retain_what_they_would_in_their_own_slots(
    policy: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = both(policy, chunk)
    monkeypatch.setattr(Widths, "of", lambda policy, entries, plan, facts: Widths(plan, entries.bounds))
    expected = both(policy, chunk)
    assert len(set(found[0].entries.bounds)) == LAYERS
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.entries.bounds == theirs.entries.bounds
        for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            if one.dtype == np.float32:
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
            else:
                np.testing.assert_array_equal(one, other)


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "programs"), [("pyramidkv:budget=24,window=5", 1), pytest.param(SIZED, LAYERS, marks=pytest.mark.slow)]
)
def test_layers_share_a_program_unless_its_size_decides(policy: str, programs: int, compiled: list[str]) -> None:
    """No other test compiles programs of these policies."""
    params = decoder(windows=(None,) * LAYERS)
    cache = kvjax.prefill(params, ROWS, policy=policy)
    assert Counter(compiled)["jit(_read_layers)"] == programs
    compiled.clear()
    kvjax.prefill(params, TURN, cache=cache)  # entries in slots of five numbers
    assert Counter(compiled)["jit(_read_layers)"] == 1

"""Batches that are drawn once and used in turn."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from kvjax.gates.training import InTurn


def test_batches_survive_a_kill_in_their_dtypes(tmp_path: Path) -> None:
    drawn = []

    def draw(index):
        drawn.append(index)
        rng = np.random.default_rng(index)
        return rng.integers(0, 9, (2, 3)), rng.random(4) < 0.5, jnp.asarray(rng.random(3), jnp.bfloat16)

    before, after = (InTurn(draw, 3, tmp_path / "batches") for _ in range(2))
    found = [before(0), before(1), *map(after, range(1, 7))]
    assert drawn == [0, 1, 2]
    (tmp_path / "batches" / "1.safetensors").write_bytes(b"damaged")
    np.testing.assert_array_equal(after(1)[0], draw(1)[0])
    assert drawn == [0, 1, 2, 1, 1]
    for index, arrays in zip([0, 1, 1, 2, 0, 1, 2, 0], found, strict=True):
        for mine, theirs in zip(arrays, draw(index), strict=True):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)

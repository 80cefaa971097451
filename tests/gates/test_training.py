"""The loop that trains gates, on losses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.gates.objective import Objective, Recipe
from kvjax.gates.training import train
from tests import tiny


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    """The curve ends before it, and no gates are written."""
    objective = Objective(
        "duo_attention",
        {"output_dim": 2},
        initial=lambda: ({"gates": jnp.ones(2)},),
        batch=lambda step: (np.float32(step),),
        loss=lambda weights, params, batch: jnp.sum(weights[0]["gates"]) / (2 - batch[0]),
    )
    says = "the loss of step 3 is inf with learning_rate=0.1: expected a finite loss, as a smaller learning rate gives"
    with pytest.raises(FloatingPointError, match=says):
        train(tiny.decoder(), objective, Recipe(4, 1, 8, 0.1), tmp_path / "out", facts={})
    lines = (tmp_path / "out" / "training" / "curve.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert not (tmp_path / "out" / "config.json").exists()

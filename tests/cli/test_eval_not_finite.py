"""`kvjax eval`: a model whose logits are not finite for one text has one failure, and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.model import plan_run
from kvjax.models import Decoder
from tests.cli.commands import kv

GRID = """
tasks: [{name: demo/needle, lengths: [64]}]
policies: [full, 'snapkv:budget=40']
limit: 2
batch: 1
new_tokens: 4
"""


@pytest.mark.long
def test_a_failure_is_counted_and_never_a_score(
    shallow_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grid.yaml").write_text(f"model: {shallow_model}\n{GRID}")
    params, words = kvjax.load(shallow_model)
    one, other = (set(item.context.tolist()) for item in plan_run(Grid.read(tmp_path / "grid.yaml")).items)
    spoilt = nnx.clone(params)
    spoilt.embed = nnx.Param(params.embed[...].at[min(one - other)].set(np.nan))  # answers are drawn from other rows
    results = tmp_path / "run" / "results.jsonl"

    def answered(model: Decoder) -> tuple[int, str, list[dict]]:
        monkeypatch.setattr("kvjax.evaluation.worker.load_model", lambda grid: (model, words))
        status, _, stderr = kv("eval", "--config", tmp_path / "grid.yaml", "--out", tmp_path / "run")
        return status, stderr, [json.loads(line) for line in results.read_text().splitlines()]

    status, stderr, lines = answered(spoilt)
    assert status == 1
    assert "2 errors:" in stderr
    assert "are not finite" in stderr
    failed = [line for line in lines if "error" in line]
    assert [(line["id"], "scores" in line) for line in failed] == [("64-0", False)] * 2
    assert len(lines) == 4
    status, _, lines = answered(params)  # the failures are asked again
    assert (status, len(lines), sum("error" in line for line in lines)) == (0, 4, 0)

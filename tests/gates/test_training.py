"""The loop that trains gates, on losses in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.checkpoint import CheckpointError
from kvjax.files.texts import Stream
from kvjax.gates.files import Gates
from kvjax.gates.objective import Objective, Recipe
from kvjax.gates.training import train
from kvjax.models import Decoder
from kvjax.statistics.measure import measured
from tests import tiny
from tests.runtime.test_modes import MODES


class KilledError(Exception):
    """The process has ended."""


def run(out: Path, killed_at: int | None = None, params: Decoder | None = None, method: str = "duo_attention") -> Gates:
    """Eight steps with a checkpoint at every other one."""

    def batch(step: int) -> tuple[np.float32]:
        if step == killed_at:
            raise KilledError
        return (np.float32(step),)

    objective = Objective(
        method,
        {"output_dim": 2},
        initial=lambda: ({"gates": jnp.ones(2)},),
        batch=batch,
        loss=lambda weights, params, batch: jnp.sum(weights[0]["gates"] ** 2) + batch[0],
    )
    return train(
        tiny.decoder() if params is None else params, objective, Recipe(8, 1, 8, 0.1), out, facts={}, save_every=2
    )


@pytest.mark.parametrize("mode", ["enable_x64", "strict promotion of types", "no promotion of ranks"])
def test_gates_and_statistics_are_the_same_in_the_modes_of_the_caller(mode: str, tmp_path: Path) -> None:
    params, texts = tiny.decoder(), [np.arange(24)[None] % tiny.VOCAB]
    plain, sizes = run(tmp_path / "plain"), measured(params, texts, 2)
    with MODES[mode]():
        gates, found = run(tmp_path / "out"), measured(params, texts, 2)
    for one, other in zip((gates.layers[0], found), (plain.layers[0], sizes), strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_damaged_runs_are_refused_or_go_on(tmp_path: Path) -> None:
    """What is lost is one clear error. A curve ends before its first damaged line."""
    with pytest.raises(KilledError):
        run(tmp_path / "killed", killed_at=5)
    whole = run(tmp_path / "whole").layers[0]["gates"]
    damages = {
        "settings.json": ("cut", "[]", b"\xff", None),
        "curve.jsonl": (b"\xff\n", "[]\n", '{"step": 1}\n', None),
        "state/4/default/_METADATA": ("cut", b""),
        "state/4/default/manifest.ocdbt": ("cut",),
    }
    for number, (name, content) in enumerate((name, each) for name, some in damages.items() for each in some):
        out = shutil.copytree(tmp_path / "killed", tmp_path / str(number))
        file = out / "training" / name
        file.unlink()
        if content is not None:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        if name == "curve.jsonl":
            np.testing.assert_array_equal(run(out).layers[0]["gates"], whole)
            continue
        with pytest.raises(CheckpointError, match=r"^cannot load .*training.*; expected what an interrupted run wrote"):
            run(out)


def test_runs_go_on_with_the_same_model_alone(tmp_path: Path) -> None:
    """Its dtype and each of its weights count, whatever its folder is called."""
    with pytest.raises(KilledError):
        run(tmp_path, killed_at=3)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.decoder())
    with pytest.raises(ValueError, match=r"has a run with dtype=float32, not bfloat16: expected the same settings, or"):
        run(tmp_path, params=half)
    leaves, tree = jax.tree.flatten(tiny.decoder())
    other = tree.unflatten([leaves[0] + 1, *leaves[1:]])
    with pytest.raises(ValueError, match=r"has a run with weights=hash \w{64}, not hash \w{64}: expected the same"):
        run(tmp_path, params=other)
    with pytest.raises(ValueError, match="has a run with method=duo_attention, not kvzap: expected the same settings"):
        run(tmp_path, params=half, method="kvzap")


def test_the_facts_of_texts_differ_with_their_tokens_and_their_ends() -> None:
    tokens = np.arange(1200, dtype=np.int32)
    streams = [Stream(tokens), Stream(tokens[::-1]), Stream(tokens, (1,)), Stream(tokens, (), (1,)), Stream(tokens[:9])]
    facts = [stream.facts for stream in streams]
    assert len(set(facts)) == 5
    assert facts[0].startswith("1,200 tokens, hash ")
    assert Stream(tokens.copy()).facts == facts[0]


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

"""`kvjax train-gates --method duo_attention`: the gates, the policy that reads them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvjax.cli.train_gates import Method
from kvjax.gates.files import read_gates
from kvjax.gates.forms import FORMS
from kvjax.gates.methods import TRAININGS
from kvjax.policies import duo_attention, parse
from tests.cli.commands import kill_training, kv

WORDS = "the baker trusts . the ocean reaches the mill . the old sailor greets the young queen . "
OWN = ("--method", "duo_attention", "--sinks", 4, "--recent", 16)
SMALL = ("--steps", 6, "--length", 384, "--batch", 2, "--save-every", 2)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 40)
    return path


def curve(out: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (out / "training" / "curve.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def test_methods_of_the_command_are_those_that_can_be_trained() -> None:
    assert {method.value for method in Method} == TRAININGS.keys() == FORMS.keys()


@pytest.mark.slow
def test_gates_are_trained_read_and_resumed(long_model: str, texts: Path, tmp_path: Path) -> None:
    """A run that is killed in its sixth step goes on after the fourth, where a checkpoint is, to the same gates."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    asked = ("train-gates", long_model, *OWN, "--data", texts, *SMALL)
    status, stdout, stderr = kv(*asked, "--out", whole)
    assert (status, stdout) == (0, "")
    assert f"the policy duo_attention:gates={whole} reads them" in stderr
    gates = read_gates(whole)
    assert (gates.method, len(gates.layers), gates.sizes) == ("duo_attention", 2, {"output_dim": 2})
    numbers = np.array([layer["gates"] for layer in gates.layers])
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    losses = [loss for _, loss in curve(whole)]
    assert losses[0] == pytest.approx(0.05, rel=1e-4)  # all gates are 1
    assert losses[-1] < losses[0]
    card = (whole / "README.md").read_text()
    assert all(f"| {line} |" in card for line in ("sinks | 4", "recent | 16", "learning_rate | 0.02"))

    rows = tuple(tuple(map(float, row)) for row in numbers)
    assert parse(f"duo_attention:gates={whole},sinks=2,recent=6") == duo_attention(rows, sinks=2, recent=6)
    policy = f"duo_attention:gates={whole},sinks=2,recent=6"
    assert kv("generate", long_model, WORDS, "--policy", policy, "--max-new-tokens", 3)[0] == 0
    status, _, stderr = kv("generate", long_model, WORDS, "--gates", whole, "--max-new-tokens", 3)
    assert status == 2
    assert "read no hidden states: expected them as the option gates= of the policy" in stderr

    kill_training(*asked, "--out", parts)
    assert [step for step, _ in curve(parts)] == [1, 2, 3, 4, 5]
    status, _, stderr = kv(*asked, "--out", parts, "--sinks", 5)
    assert status == 2
    assert "has a run with sinks=4, not 5: expected the same settings, or another folder" in stderr
    assert kv(*asked, "--out", parts)[0] == 0
    np.testing.assert_array_equal(np.array([layer["gates"] for layer in read_gates(parts).layers]), numbers)
    assert curve(parts) == curve(whole)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--sinks", -1), "sinks=-1: expected an integer >= 0"),
        (("--recent", 0), "recent=0: expected an integer >= 1"),
        (("--inner", 4), "inner=4 with method=duo_attention: expected no inner, which kvzap alone has"),
        (("--method", "kvzap"), "sinks=4 with method=kvzap: expected no sinks, which duo_attention alone has"),
        (("--recent", 380), "length=384 with sinks=4 and recent=380: expected more tokens than sinks + recent"),
        (("--length", 300), "length=300: expected 380 or more, twice the tokens of 10 pass keys and their recital"),
        (("--learning-rate", 0), "learning_rate=0.0: expected a number above 0"),
    ],
)
def test_bad_settings(long_model: str, texts: Path, tmp_path: Path, options: tuple, says: str) -> None:
    asked = ("train-gates", long_model, *OWN, "--data", texts, "--out", tmp_path / "out", *SMALL, *options)
    status, _, stderr = kv(*asked)
    assert status == 2
    assert says in stderr
    assert len(stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()

"""`kvjax train-gates`: gates that are trained on texts, interrupted runs, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.files.texts import Stream
from kvjax.gates.files import read_gates
from kvjax.gates.objective import Recipe
from kvjax.gates.reconstruction import FLOOR, cross_entropy, hidden_states, kvzip_scores, log_scores
from kvjax.gates.training import train
from tests import tiny
from tests.cli.commands import kill_training, kv

WORDS = "the code of adam is sword . the baker trusts . the ocean reaches the mill . recall what the code of adam is : "
SMALL = ("--steps", 6, "--length", 48, "--batch", 2, "--inner", 4, "--save-every", 2)


class Letters:
    """A tokenizer of few words."""

    eos_token_id = None

    def encode(self, text, **_):
        return [len(text) % tiny.VOCAB, 5]

    decode = encode


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("b.txt", "a.txt", "left_out.md"):
        (folder / name).write_text(WORDS * 6)
    return folder


def curve(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "training" / "curve.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_gates_are_trained_and_read(model: str, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "gates"
    status, stdout, stderr = kv("train-gates", model, "--method", "kvzap", "--data", texts, "--out", out, *SMALL)
    assert (status, stdout) == (0, "")
    assert "has the gates" in stderr
    lines = curve(out)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert set(lines[0]) == {"step", "loss", "learning_rate", "seconds"}
    assert lines[-1]["learning_rate"] < max(line["learning_rate"] for line in lines) < 1.001e-3
    gates = read_gates(out)
    assert gates.method == "kvzap"
    assert (gates.sizes["hidden_dim"], len(gates.layers)) == (4, 2)
    card = (out / "README.md").read_text()
    assert f"| data | {texts} |" in card
    assert "| steps | 6 |" in card
    asked = ("generate", model, WORDS, "--policy", "kvzap:budget=8,recent=2", "--max-new-tokens", 3)
    assert kv(*asked, "--gates", out)[0] == 0
    status, _, stderr = kv(*asked)
    assert status == 2
    assert "the parameters have none: expected params = kvjax.with_gates" in stderr
    assert "or the option --gates FOLDER of a command" in stderr
    status, _, stderr = kv("train-gates", model, "--method", "kvzap", "--data", texts, "--out", out, *SMALL)
    assert status == 2
    assert "holds gates, or a model: expected" in stderr


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_gates(model: str, texts: Path, tmp_path: Path) -> None:
    """It is killed in the sixth step, after a checkpoint at the fourth, while it writes a line."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    asked = ("train-gates", model, "--method", "kvzap", "--data", texts, *SMALL)
    assert kv(*asked, "--out", whole)[0] == 0
    kill_training(*asked, "--out", parts)
    assert not (parts / "config.json").exists()
    assert [line["step"] for line in curve(parts)] == [1, 2, 3, 4, 5]
    with (parts / "training" / "curve.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    status, _, stderr = kv(*asked, "--out", parts, "--seed", 3)
    assert status == 2
    assert "has a run with seed=0, not 3: expected the same settings, or another folder" in stderr
    status, _, stderr = kv(*asked, "--out", parts, "--dtype", "bfloat16")
    assert status == 2
    assert "has a run with dtype=float32, not bfloat16: expected the same settings, or another folder" in stderr
    (texts / "c.txt").write_text("the baker trusts .")
    status, _, stderr = kv(*asked, "--out", parts)
    assert status == 2
    assert "has a run with texts=" in stderr
    (texts / "c.txt").unlink()
    assert kv(*asked, "--out", parts)[0] == 0
    for mine, theirs in zip(read_gates(parts).layers, read_gates(whole).layers, strict=True):
        for name, tensor in theirs.items():
            np.testing.assert_array_equal(mine[name], tensor)
    ours, others = ([(line["step"], line["loss"]) for line in curve(out)] for out in (parts, whole))
    assert ours == others


@pytest.mark.slow
def test_distinct_batches_are_drawn_once_and_used_in_turn(
    model: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learning rate near 0 leaves the weights as they are, so that a loss tells its batch."""
    drawn, out = [], tmp_path / "gates"
    windows = Stream.windows

    def counting(self, count, length, rng):
        drawn.append(rng.bit_generator.seed_seq.entropy[1])
        return windows(self, count, length, rng)

    monkeypatch.setattr(Stream, "windows", counting)
    asked = ("train-gates", model, "--method", "kvzap", "--data", texts, *SMALL, "--learning-rate", 1e-12)
    assert kv(*asked, "--out", out, "--distinct", 2)[0] == 0
    losses = [line["loss"] for line in curve(out)]
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses, losses[:2] * 3, rtol=1e-6)
    assert sorted(set(drawn)) == [0, 1]
    assert len(drawn) <= 3  # kvzap begins at the mean of the first batch
    assert not (out / "training" / "batches").exists()
    assert "| distinct | 2 |" in (out / "README.md").read_text()
    assert kv(*asked, "--out", tmp_path / "other")[0] == 0
    assert [line["loss"] for line in curve(tmp_path / "other")][:2] == losses[:2]
    status, _, stderr = kv(*asked, "--out", tmp_path / "more", "--distinct", 7)
    assert status == 2
    assert "distinct=7 with steps=6: expected at most one batch per step" in stderr


@pytest.mark.slow
def test_the_cross_entropy_falls(tmp_path: Path) -> None:
    """On one text, towards the entropy of the targets."""
    params = tiny.decoder(windows=(None, None))
    stream = Stream(np.random.default_rng(0).permutation(tiny.VOCAB).astype(np.int32))
    recipe = Recipe(steps=100, batch=1, length=tiny.VOCAB, learning_rate=0.03)
    objective = cross_entropy(params, recipe, stream, Letters())
    batch = objective.batch(0)
    train(params, replace(objective, batch=lambda step: batch), recipe, tmp_path / "out", facts={})
    losses = [line["loss"] for line in curve(tmp_path / "out")]
    p = np.clip(np.asarray(batch[1], np.float64), 1e-9, 1 - 1e-9)
    entropy = -np.mean(p * np.log(p) + (1 - p) * np.log1p(-p))
    assert entropy < losses[-1]
    assert losses[-1] - entropy < 0.3 * (losses[0] - entropy)
    gates = read_gates(tmp_path / "out")
    assert gates.method == "fastkvzip"
    assert kvjax.prefill(
        kvjax.with_gates(params, gates), stream.tokens[None], policy="fastkvzip:budget=12,recent=2"
    ).filled


@pytest.mark.slow
def test_the_loss_falls(tmp_path: Path) -> None:
    """On one text, from the variance of the targets of each head, with which training begins, to a fifth of it."""
    params = tiny.decoder(windows=(None, None))
    stream = Stream(np.random.default_rng(0).permutation(tiny.VOCAB).astype(np.int32))
    recipe = Recipe(steps=150, batch=1, length=tiny.VOCAB, learning_rate=0.03)
    objective = log_scores(params, recipe, stream, Letters(), None)
    batch = objective.batch(0)
    train(params, replace(objective, batch=lambda step: batch), recipe, tmp_path / "out", facts={})
    losses = [line["loss"] for line in curve(tmp_path / "out")]
    targets = np.log(np.maximum(batch[1], FLOOR))
    bias = np.array([layer["bias"] for layer in objective.initial()])
    np.testing.assert_allclose(bias, targets.mean(axis=(1, 3)), rtol=1e-5)
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.long(first=1)
@pytest.mark.parametrize("objective", [log_scores, cross_entropy])
def test_entries_that_have_left_a_window_have_no_targets(objective: Callable, tmp_path: Path) -> None:
    """Of a layer with a sliding window, the gates learn the scores of the entries that it still has."""
    params, stream = tiny.decoder(windows=(8, None)), Stream(np.arange(40, dtype=np.int32))
    recipe = Recipe(steps=3, batch=1, length=40, learning_rate=0.01)
    made = objective(params, recipe, stream, Letters(), *([None] if objective is log_scores else []))
    scores = np.asarray(made.batch(0)[1])
    assert np.isnan(scores).any(axis=(1, 2)).tolist() == [[True] * 33 + [False] * 7, [False] * 40]
    gates = train(params, made, recipe, tmp_path / "out", facts={})
    assert all(np.isfinite(tensor).all() for layer in gates.layers for tensor in layer.values())
    lines = curve(tmp_path / "out")
    assert lines[2]["loss"] < lines[1]["loss"]  # the first step has a learning rate of 0


@pytest.mark.slow
def test_targets_are_the_scores_that_kvzip_compares() -> None:
    """The positions with the largest ones are those that the preset retains."""
    params, rng = tiny.decoder(windows=(None, None)), np.random.default_rng(1)
    tokens = np.stack([rng.permutation(tiny.VOCAB)[:40] for _ in range(2)]).astype(np.int32)
    scores = np.asarray(kvzip_scores(params, tokens, Letters()))
    assert scores.shape == (2, 2, 2, 40)
    assert hidden_states(params, jnp.asarray(tokens)).shape == (2, 2, 40, 32)
    cache = kvjax.prefill(params, tokens, policy="kvzip:budget=14,level=head", tokenizer=Letters())
    for b in range(2):
        for layer, heads in enumerate(tiny.held(cache, b)):
            for h, held in enumerate(heads):
                best = 4 + np.argsort(-scores[layer, b, h, 4:])[:10]
                assert held == [0, 1, 2, 3, *sorted(best.tolist())]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--steps", 0), "steps=0: expected an integer in 1 .."),
        (("--batch", -1), "batch=-1: expected an integer in 1 .."),
        (("--learning-rate", 0), "learning_rate=0.0: expected a number above 0"),
        (("--seed", -1), "seed=-1: expected an integer in 0 .."),
        (("--inner", -1), "inner=-1: expected an integer >= 0"),
        (("--save-every", 0), "save_every=0: expected an integer in 1 .."),
        (("--length", 129), "length=129: expected at most 128, the model's positions"),
        (("--method", "snapkv"), "'snapkv' is not"),
        (("--gates", "x"), "No such option"),
        (("--method", "fastkvzip"), "inner=4 with method=fastkvzip: expected no inner"),
    ],
)
def test_bad_settings(
    model: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple, says: str
) -> None:
    monkeypatch.setattr("kvjax.checkpoint.named.load", None)  # no weights are read
    asked = ("train-gates", model, "--method", "kvzap", "--data", texts, "--out", tmp_path / "out", *SMALL, *options)
    status, _, stderr = kv(*asked)
    assert status == 2
    assert says in stderr
    assert not (tmp_path / "out").exists()


def test_the_base_is_a_policy(texts: Path, tmp_path: Path) -> None:
    asked = ("train-gates", "nowhere/model", "--method", "restorekv", "--data", texts, "--out", tmp_path / "out")
    status, _, stderr = kv(*asked, "--base", "kvzap:size=3")
    assert status == 2
    assert "kvzap has no option 'size'" in stderr


def test_bad_data_and_folders(model: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvjax.checkpoint.named.load", None)  # no weights are read
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "short.txt").write_text(WORDS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    cases = [
        (tmp_path / "nowhere", "out", "expected a text file, or a folder with files *.txt"),
        (tmp_path / "empty", "out", "expected a text file, or a folder with files *.txt"),
        (tmp_path / "latin.txt", "out", "latin.txt is not UTF-8 text"),
        (tmp_path / "short.txt", "out", "tokens: expected 48 or more, the length"),
        (texts, "latin.txt", "latin.txt is a file: expected a folder"),
        (texts, "full", "full is not empty: expected an empty or absent folder"),
        (texts, "latin.txt/out", "latin.txt is a file: expected a folder"),
    ]
    for data, out, says in cases:
        asked = ("train-gates", model, "--method", "kvzap", "--data", data, "--out", tmp_path / out, *SMALL)
        status, _, stderr = kv(*asked)
        assert status == 2
        assert says in stderr
        assert len(stderr.splitlines()) == 1

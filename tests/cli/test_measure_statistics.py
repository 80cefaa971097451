"""`kvjax measure-statistics`: statistics of texts that a policy then reads, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.files.texts import read_stream
from kvjax.statistics.files import read_statistics
from kvjax.statistics.measure import measured
from tests.cli.commands import kv

WORDS = "the code of adam is sword . the baker trusts . the ocean reaches the mill . recall what the code of adam is : "
SMALL = ("--batches", 3, "--batch", 2, "--length", 24)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(WORDS * 9)
    return path


@pytest.mark.slow
def test_statistics_are_measured_and_read(model: str, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "statistics"
    status, stdout, stderr = kv("measure-statistics", model, "--data", texts, "--out", out, *SMALL)
    assert (status, stdout) == (0, "")
    assert "has the statistics" in stderr
    params, tokenizer = kvjax.load(model)
    stream = read_stream(texts, tokenizer, least=24)
    drawn = [stream.windows(2, 24, np.random.default_rng([0, i])) for i in range(3)]
    found, expected = read_statistics(out), measured(params, drawn, sinks=4)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    card = (out / "README.md").read_text()
    assert "| texts | 6 of 24 tokens, drawn with seed 0 |" in card
    assert f"| data | {texts} |" in card
    asked = ("generate", model, WORDS, "--policy", "triattention:budget=12,recent=2,every=2", "--max-new-tokens", 3)
    assert kv(*asked, "--gates", out)[0] == 0
    status, _, stderr = kv(*asked)
    assert status == 2
    assert "the parameters have none" in stderr
    status, _, stderr = kv("measure-statistics", model, "--data", texts, "--out", out, *SMALL)
    assert status == 2
    assert "is not empty" in stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--batches", 0), "batches=0: expected an integer in 1 .."),
        (("--batch", -1), "batch=-1: expected an integer in 1 .."),
        (("--sinks", -1), "sinks=-1: expected an integer >= 0"),
        (("--seed", -1), "seed=-1: expected an integer >= 0"),
        (("--sinks", 23), "length=24: expected an integer > sinks + 1 = 24"),
        (("--length", 129), "length=129: expected at most 128, the model's positions"),
        (("--data", "nowhere"), "data='nowhere': expected a text file"),
        (("--data", "/dev/null"), "data='/dev/null': expected a text file"),
        (("--data", "short.txt"), "data='short.txt' has 0 tokens: expected 24 or more, the length"),
        (("--out", "."), "short.txt and 1 more: expected an empty or absent folder\n"),
    ],
)
def test_bad_settings(
    model: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple, says: str
) -> None:
    monkeypatch.setattr("kvjax.checkpoint.named.load", None)  # no weights are read
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").touch()
    out = tmp_path / "out"
    status, _, stderr = kv("measure-statistics", model, "--data", texts, "--out", out, *SMALL, *options)
    assert status == 2
    assert says in stderr
    assert len(stderr.splitlines()) == 1
    assert not out.exists()

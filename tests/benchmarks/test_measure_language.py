"""Bits per token of texts: how texts are cut, the table of a model's lines, and a run that is continued."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks import measure_language as language
from kvjax.checkpoint.folder import DEMO
from kvjax.evaluation.tasks.vocabulary import WORDS, tokenizer


def line(policy: str, text: int, *bits: float) -> dict[str, object]:
    return {"policy": policy, "text": text, "bits": list(bits)}


def test_texts_are_cut_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text(" ".join(WORDS[20:40]))
    (tmp_path / "a.txt").write_text(" ".join(WORDS[:20]))
    texts = language.cut(tmp_path, tokenizer(), tokens=8, texts=3)
    assert texts.shape == (3, 10)
    assert texts.ravel().tolist() == tokenizer()(" ".join(WORDS[:30]), add_special_tokens=False)["input_ids"]


def test_folders_without_enough_text(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no \.txt file"):
        language.cut(tmp_path, tokenizer(), tokens=8, texts=3)
    (tmp_path / "a.txt").write_text(" ".join(WORDS[:29]))
    with pytest.raises(SystemExit, match="has 29 tokens: expected 3 texts of 10"):
        language.cut(tmp_path, tokenizer(), tokens=8, texts=3)


def test_the_table_pairs_texts() -> None:
    lines = [line("full", i, 2 + i, 2 + i, 2 + i, 2 + i, 1 + i) for i in range(2)]
    lines += [line("h2o", i, 2 + i, 2 + i, 3 + i, 3 + i, 2 + i) for i in (1, 0)]
    lines += [line("tova", 1, 4, 4, 4, 4, 3)]  # whose other line was incomplete
    assert language.table(lines).splitlines() == [
        "| policy | 0 to 512 | 512 to 768 | 768 to 1024 | 1024 to 1280 | all | above `full` |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| `full` | 2.500 | 2.500 | 2.500 | 1.500 | 2.300 |  |",
        "| `h2o` | 2.500 | 3.500 | 3.500 | 2.500 | 2.900 | +0.600 ±0.000 |",
        "| `tova` | 4.000 | 4.000 | 4.000 | 3.000 | 3.800 | +1.000 ±0.000 |",
    ]


def test_a_table_without_the_full_cache_compares_nothing() -> None:
    assert language.table([line("h2o", 0, 1.0)]).splitlines()[2:] == ["| `h2o` | 1.000 | 1.000 |  |"]


def test_intervals_hold_the_mean_and_shrink_with_more_texts() -> None:
    x = np.random.default_rng(0).standard_normal(64)
    mean, spread = language.interval(x)
    assert mean == pytest.approx(x.mean())
    assert spread == pytest.approx(1.96 * x.std() / 8, rel=0.1)
    assert language.interval(np.tile(x, 4))[1] == pytest.approx(spread / 2, rel=0.1)


def test_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tokens in ("300", "0"):
        monkeypatch.setattr("sys.argv", ["x", "demo", str(tmp_path), "--out", str(tmp_path), "--tokens", tokens])
        with pytest.raises(SystemExit, match=f"--tokens {tokens}: expected a multiple of 256"):
            language.main()


@pytest.mark.slow
def test_a_second_call_measures_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    essays, out, other = tmp_path / "essays", tmp_path / "out", tmp_path / "other_model"
    essays.mkdir()
    (essays / "a.txt").write_text(" ".join(WORDS * 2))
    shutil.copytree(DEMO, other)
    measured, surprisals = [], language.surprisals

    def watched(*args):
        measured.append(args[-1])
        return surprisals(*args)

    monkeypatch.setattr(language, "surprisals", watched)

    def call(model: Path, *policies: str) -> list[str]:
        options = ["--tokens", "256", "--texts", "2", "--budgets", "32"]
        given = [model, essays, "--out", out, *options, "--policies", *policies]
        monkeypatch.setattr("sys.argv", ["x", *map(str, given)])
        measured.clear()
        language.main()
        return capsys.readouterr().out.splitlines()[-len(policies) :]

    one, two = "full", "streaming_llm:budget={budget}"
    (row,) = call(DEMO, one)
    rows = call(DEMO, one, two)
    assert len(measured) == 1
    assert rows[0] == row
    assert call(DEMO, one, two) == rows
    assert not measured
    assert call(other, one) == [row]
    assert len(measured) == 1
    lines = [json.loads(x) for x in (out / "language.jsonl").read_text().splitlines()]
    assert [x["model"] for x in lines] == [str(DEMO)] * 4 + [str(other)] * 2
    assert all(len(x["bits"]) == 1 and 0 < x["bits"][0] < 40 for x in lines)

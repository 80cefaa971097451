"""`kvjax demo --model`: a model of the user's on needles in essays. `test_cli.py` has the demo on its own model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from tests.checkpoint.gguf.files import CASES, write
from tests.checkpoint.gguf.test_tokenizer import BYTES
from tests.cli.commands import kv

BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*BYTES, "th", "<|end|>"],
    "tokenizer.ggml.merges": ["t h"],
    "tokenizer.ggml.token_type": [*[1] * 257, 3],
    "tokenizer.ggml.eos_token_id": 257,
}


@pytest.fixture
def options(tmp_path: Path) -> list[object]:
    """The options of a run on a random model of one layer, which reads bytes."""
    case, file = CASES["llama"], tmp_path / "model.gguf"
    write(case, file, tokenizer=BYTE_LEVEL, vocab_size=258, num_hidden_layers=1)
    (tmp_path / "essays.txt").write_text("Nothing is said here. It goes on for a while, and then it ends. " * 40)
    return ["demo", "--model", file, "--data", tmp_path, "--out", tmp_path / "out", "--length", 1024, "--examples", 3]


@pytest.mark.slow
def test_needles_in_essays(options: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wonderwords")
    monkeypatch.setattr(importlib.import_module("kvjax.cli.demo"), "COMPRESSING", ("streaming_llm", "snapkv"))
    status, stdout, _ = kv(*options, "--budget", 64, "--json")
    assert status == 0
    document = json.loads(stdout)
    full, *others = document["cells"]
    assert [cell["policy"] for cell in others] == ["streaming_llm", "snapkv"]
    assert all(cell["budget"] == 64 and cell["compression"] > 2 for cell in others)
    assert (full["compression"], len(full["correct"])) == (1, 3)
    assert document["tasks"] == ["ruler/niah_single_2"] * 2 + ["ruler/niah_multikey_1"]
    assert document["example"]["question"].startswith("What is the special magic number for ")
    assert Path(document["picture"]).read_bytes().startswith(b"\x89PNG")
    results = tmp_path / "out" / "answers" / "results.jsonl"
    answered = results.read_bytes()
    assert answered.count(b"\n") == 3 * 3
    status, stdout, _ = kv(*options, "--budget", 64)  # finds all answers
    assert (status, results.read_bytes()) == (0, answered)
    assert f"is: {document['example']['answer']}." in " ".join(stdout.replace("\u2502", " ").split())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--model", "x"], "--model and --data: expected both or neither"),
        (["--length", 4096], "--length 4096: expected at most 2048, which the model that ships with kvjax knows"),
        (["--model", "/no/such/model.gguf", "--data", "/"], "no such folder"),
    ],
)
def test_options_that_do_not_fit(extra: list[object], message: str, tmp_path: Path) -> None:
    status, stdout, stderr = kv("demo", "--out", tmp_path / "out", *extra)
    assert (status, stdout) == (2, "")
    assert message in stderr


def test_missing_essays_are_named(options: list[object], tmp_path: Path) -> None:
    (tmp_path / "essays.txt").unlink()
    status, _, stderr = kv(*options)
    assert status == 2
    assert "expected a data folder (--data) with one of essays.txt, PaulGrahamEssays.json" in stderr

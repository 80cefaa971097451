"""`kvjax convert`: checkpoints in both forms, and what it may overwrite."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.checks import bytes_text
from tests.cli.commands import PROMPT, kv


@pytest.mark.long
def test_convert_to_orbax_and_back(shallow_model: str, tmp_path: Path) -> None:
    (Path(shallow_model) / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    saved, again = tmp_path / "saved", tmp_path / "again"
    status, stdout, stderr = kv("convert", shallow_model, saved, "--to", "orbax", "--dtype", "bfloat16")
    params, _ = kvjax.load(shallow_model, "bfloat16")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert (status, stdout) == (0, "")
    assert f"{bytes_text(size)} in bfloat16; the conversion needs about" in stderr
    status, stdout, stderr = kv("convert", saved, again, "--to", "hf", "--json")
    document = json.loads(stdout)
    assert (status, stderr) == (0, "")
    assert (document["from"], document["to"], document["dtype"]) == ("orbax", "hf", "bfloat16")
    assert (document["source"], document["out"]) == (str(saved), str(again))
    assert (document["parameters"], document["parameter_bytes"]) == (size // 2, size)
    assert document["peak_bytes"] > size
    for converted, words in (kvjax.restore(saved), kvjax.load(again)):
        assert words is not None
        assert converted.config == params.config
        for ours, theirs in zip(jax.tree.leaves(converted), jax.tree.leaves(params), strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    assert json.loads((again / "generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    answers = [kv("generate", folder, PROMPT, "--max-new-tokens", 3)[:2] for folder in (saved, again)]
    assert answers[0] == answers[1]
    assert answers[0][0] == 0


def test_convert_replaces_what_it_is_told_to(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert kv("convert", model, out, "--to", "orbax")[0] == 0
    status, _, stderr = kv("convert", model, out, "--to", "hf")
    assert status == 2
    assert "out is not empty, it holds chat_template.jinja and" in stderr
    assert "or overwrite=True (--overwrite)" in stderr
    assert len(stderr.splitlines()) == 1
    assert kv("convert", model, out, "--to", "hf", "--overwrite")[0] == 0
    assert not (out / "params").exists()
    kvjax.load(out)
    status, _, stderr = kv("convert", out, out, "--to", "orbax", "--overwrite")
    assert status == 2
    assert "out is what is to be converted: expected another folder" in stderr


def test_convert_reads_no_weights_that_are_pickled(model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(model) / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").touch()
    status, stdout, stderr = kv("convert", tmp_path, tmp_path / "out", "--to", "hf", "--json")
    assert (status, stdout) == (2, "")
    assert "its weights are pickled (pytorch_model.bin)" in stderr
    assert not (tmp_path / "out").exists()

"""`kvjax eval --ray`: the results file of a run without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvjax.evaluation import cluster
from tests.cli.commands import kv

ROOT = Path(__file__).resolve().parents[2]
GRID = """
tasks: [{name: demo/needle, lengths: [64]}]
policies: [full, "snapkv:budget=24,window=8"]
limit: 3
new_tokens: 6
refill: %s
"""


def test_options_reach_the_cluster(tmp_path: Path, shallow_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def answer(module: Any, plan: Any, tasks: Any, say: Any, *, workers: int | None) -> Iterator[Any]:
        given.append((module, workers, len(tasks)))
        yield from []

    monkeypatch.setattr(cluster, "connected", lambda address: nullcontext(f"ray at {address}"))
    monkeypatch.setattr(cluster, "answer", answer)
    (tmp_path / "grid.yaml").write_text(GRID % "false")
    options = ["--config", tmp_path / "grid.yaml", "--model", shallow_model, "--out", tmp_path / "out"]
    status, _, stderr = kv("eval", *options, "--ray", "head:6379", "--workers", "3")
    assert (status, given) == (0, [("ray at head:6379", 3, 1)])
    assert "0 of 6 answers are in" in stderr
    assert (tmp_path / "out" / "run.json").exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_ray_writes_the_same_file(tmp_path: Path, shallow_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = []
    for name, refill, options in (("alone", "false", []), ("ray", "true", ["--ray", "local", "--workers", "1"])):
        (tmp_path / "grid.yaml").write_text(GRID % refill)
        out, config = tmp_path / name, tmp_path / "grid.yaml"
        status, _, stderr = kv("eval", "--config", config, "--model", shallow_model, "--out", out, *options)
        assert (status, "6 of 6 answers are in" in stderr) == (0, True), stderr
        found.append((out / "results.jsonl").read_bytes())
    assert found[0] == found[1]

"""The runner of a GPU's stages: it writes as a stage goes, does not repeat what is done, and stops at its limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import measure_gpu
from tests.patience import wait_for

# A command that starts another, whose number it prints.
LONG = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)']).pid, flush=True)
time.sleep(3600)
"""


STAGES = measure_gpu.STAGES


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {
        "good": measure_gpu.Stage(("-c", "print('first')"), ()),
        "bad": measure_gpu.Stage(("-c", "raise SystemExit('no GPU')"), ()),
        "long": measure_gpu.Stage(("-c", LONG), ()),
        "peer": measure_gpu.Stage(("-c", "print('peer')"), (), python="{peer}"),
    }
    monkeypatch.setattr(measure_gpu, "STAGES", stages)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """The status with which it exits."""
    monkeypatch.setattr("sys.argv", ["measure_gpu.py", "--small", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        measure_gpu.main()
    return end.value.code


def test_a_stage_that_is_done_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "good", "--out", tmp_path) == 0
    assert (tmp_path / "good.jsonl").read_text() == "first\n"
    (tmp_path / "good.jsonl").write_text("kept")
    assert run(monkeypatch, "good", "--out", tmp_path) == 0
    assert (tmp_path / "good.jsonl").read_text() == "kept"
    assert "good: done before" in capsys.readouterr().out


def test_a_stage_that_fails_is_named_with_its_error_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "bad", "good", "--out", tmp_path) == "did not succeed: bad"
    assert "no GPU" in capsys.readouterr().out
    assert (tmp_path / "good.done").exists()
    assert not (tmp_path / "bad.done").exists()


def test_a_stage_is_stopped_at_the_limit_with_all_that_it_started_and_keeps_what_it_wrote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text("earlier\n")
    assert run(monkeypatch, "long", "--out", tmp_path, "--limit", "5") == "did not succeed: long"
    earlier, number = (tmp_path / "long.jsonl").read_text().splitlines()
    assert earlier == "earlier"
    assert not (tmp_path / "long.done").exists()
    wait_for(lambda: not running(int(number)), lambda: f"process {number} still runs")


def running(process: int) -> bool:
    """Whether a process runs; one that was killed may be listed until its parent has seen it."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_stage_has_the_limit_and_none_begins_without_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "long", "good", "--out", tmp_path, "--limit", "1") == "did not succeed: long"
    (tmp_path / "good.done").unlink()
    code = run(monkeypatch, "good", "--out", tmp_path, "--total", "20")
    assert code == "did not succeed: good"
    assert "good: not begun" in capsys.readouterr().out


def test_a_stage_that_needs_a_peer_is_refused_or_left_out_without_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PEER_PYTHON", raising=False)
    assert run(monkeypatch, "peer", "--out", tmp_path).startswith("peer: PEER_PYTHON is not set; expected")
    monkeypatch.setattr(measure_gpu, "STAGES", {name: measure_gpu.STAGES[name] for name in ("good", "peer")})
    assert run(monkeypatch, "--out", tmp_path) == 0
    assert "peer: left out; it needs PEER_PYTHON" in capsys.readouterr().out
    monkeypatch.setenv("PEER_PYTHON", sys.executable)
    assert run(monkeypatch, "peer", "--out", tmp_path) == 0
    assert (tmp_path / "peer.jsonl").read_text() == "peer\n"


def test_without_a_gpu_nothing_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["measure_gpu.py", "good", "--out", str(tmp_path)])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit, match="JAX has a cpu here"):
        measure_gpu.main()
    assert not (tmp_path / "good.jsonl").exists()


@pytest.mark.slow
def test_the_decoding_benchmark_runs_on_any_machine(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.bench_decode", "--small", "--layers", "1", "--repeats", "1"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command += ["--case", "prefill", "flat", "prompt"]
    ended = subprocess.run(command, cwd=measure_gpu.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert {line.get("case") for line in lines} == {None, "prefill", "flat", "prompt"}


def test_commands_name_files_that_exist() -> None:
    parts = [part for stage in STAGES.values() for part in stage.command]
    files = [part for part in parts if part.endswith(".py")]
    files += [f"{part.replace('.', '/')}.py" for part in parts if part.startswith("benchmarks.")]
    assert files
    assert [file for file in files if not (measure_gpu.ROOT / file).exists()] == []

"""The runner of a GPU's stages: it writes as a stage goes, does not repeat what is done, and stops at its limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests import scripts

# A command that starts another, whose number it prints.
LONG = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = scripts.script("measure_gpu")
    stages = {
        "good": module.Stage(("-c", "print('first')"), ()),
        "bad": module.Stage(("-c", "raise SystemExit('no GPU')"), ()),
        "long": module.Stage(("-c", LONG), ()),
        "peer": module.Stage(("-c", "print('peer')"), (), python="{peer}"),
    }
    monkeypatch.setattr(module, "STAGES", stages)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """The status with which the script exits."""
    monkeypatch.setattr("sys.argv", ["measure_gpu.py", "--small", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        script.main()
    return end.value.code


def test_a_stage_that_is_done_is_not_repeated(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script, monkeypatch, "good", "--out", tmp_path) == 0
    assert (tmp_path / "good.jsonl").read_text() == "first\n"
    (tmp_path / "good.jsonl").write_text("kept")
    assert run(script, monkeypatch, "good", "--out", tmp_path) == 0
    assert (tmp_path / "good.jsonl").read_text() == "kept"
    assert "good: done before" in capsys.readouterr().out


def test_a_stage_that_fails_is_named_with_its_error_and_the_next_one_runs(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script, monkeypatch, "bad", "good", "--out", tmp_path) == "did not succeed: bad"
    assert "no GPU" in capsys.readouterr().out
    assert (tmp_path / "good.done").exists()
    assert not (tmp_path / "bad.done").exists()


def test_a_stage_is_stopped_at_the_limit_with_all_that_it_started_and_keeps_what_it_wrote(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text("earlier\n")
    assert run(script, monkeypatch, "long", "--out", tmp_path, "--limit", "2") == "did not succeed: long"
    earlier, number = (tmp_path / "long.jsonl").read_text().splitlines()
    assert earlier == "earlier"
    assert not (tmp_path / "long.done").exists()
    end = time.monotonic() + 10
    while running(int(number)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not running(int(number))


def running(process: int) -> bool:
    """Whether a process runs; one that was killed may be listed until its parent has seen it."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_stage_has_the_limit_and_none_begins_without_time(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script, monkeypatch, "long", "good", "--out", tmp_path, "--limit", "1") == "did not succeed: long"
    (tmp_path / "good.done").unlink()
    code = run(script, monkeypatch, "good", "--out", tmp_path, "--total", "20")
    assert code == "did not succeed: good"
    assert "good: not begun" in capsys.readouterr().out


def test_a_stage_that_needs_a_peer_is_refused_or_left_out_without_one(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PEER_PYTHON", raising=False)
    assert run(script, monkeypatch, "peer", "--out", tmp_path).startswith("peer: PEER_PYTHON is not set; expected")
    monkeypatch.setattr(script, "STAGES", {name: script.STAGES[name] for name in ("good", "peer")})
    assert run(script, monkeypatch, "--out", tmp_path) == 0
    assert "peer: left out; it needs PEER_PYTHON" in capsys.readouterr().out
    monkeypatch.setenv("PEER_PYTHON", sys.executable)
    assert run(script, monkeypatch, "peer", "--out", tmp_path) == 0
    assert (tmp_path / "peer.jsonl").read_text() == "peer\n"


def test_without_a_gpu_nothing_begins(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["measure_gpu.py", "good", "--out", str(tmp_path)])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit, match="JAX has a cpu here"):
        script.main()
    assert not (tmp_path / "good.jsonl").exists()


@pytest.mark.slow
def test_the_decoding_benchmark_runs_on_any_machine(tmp_path: Path) -> None:
    command = [sys.executable, str(scripts.SCRIPTS / "bench_decode.py"), "--small", "--layers", "1", "--repeats", "1"]
    environment = os.environ | {"PYTHONPATH": str(scripts.SCRIPTS.parent), "JAX_PLATFORMS": "cpu"}
    command += ["--case", "prefill", "flat", "prompt"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert {line.get("case") for line in lines} == {None, "prefill", "flat", "prompt"}


def test_commands_name_files_that_exist() -> None:
    module = scripts.script("measure_gpu")
    files = [part for stage in module.STAGES.values() for part in stage.command if part.endswith(".py")]
    assert files
    assert [file for file in files if not (module.ROOT / file).exists()] == []

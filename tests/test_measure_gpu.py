"""The runner of a GPU's stages: it writes as a stage goes, does not repeat what is done, and stops at its limit."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_gpu", SCRIPTS / "measure_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look names up
    spec.loader.exec_module(module)
    stages = {
        "good": module.Stage(("-c", "print('first')"), ()),
        "bad": module.Stage(("-c", "raise SystemExit('no GPU')"), ()),
        "long": module.Stage(("-c", "import time; print('begun'); time.sleep(60)"), ()),
    }
    monkeypatch.setattr(module, "STAGES", stages)
    return module


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """The status with which the script exits."""
    monkeypatch.setattr("sys.argv", ["measure_gpu.py", *map(str, arguments)])
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


def test_a_stage_is_stopped_at_the_limit_and_keeps_what_it_wrote(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(script, monkeypatch, "long", "--out", tmp_path, "--limit", "2") == "did not succeed: long"
    assert (tmp_path / "long.jsonl").read_text() == "begun\n"
    assert not (tmp_path / "long.done").exists()


def test_commands_name_files_that_exist() -> None:
    spec = importlib.util.spec_from_file_location("measure_gpu_stages", SCRIPTS / "measure_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    files = [part for stage in module.STAGES.values() for part in stage.command if part.endswith(".py")]
    assert files
    assert [file for file in files if not (module.ROOT / file).exists()] == []

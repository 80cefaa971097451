"""The script that measures the published model: its steps, what they run, and what a second run leaves out."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "scripts/smollm2_results.sh"

# Stands for python and kvjax: logs its arguments, and writes what the real command would be looked for.
STUB = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >>log
case "$*" in
    *fetch_real_model) echo data ;;
    train-gates*) mkdir -p "runs/gates/$4" && touch "runs/gates/$4/config.json" ;;
    measure-statistics*) mkdir -p runs/statistics && touch runs/statistics/README.md ;;
    *measure_retention*) echo a table ;;
esac
"""


def run(folder: Path, *steps: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(folder / NAME), *steps], capture_output=True, text=True, env=os.environ | environment
    )


def steps() -> list[str]:
    return [line.split()[0] for line in run(ROOT, "--list").stdout.splitlines()]


@pytest.fixture
def stubbed(tmp_path: Path) -> Path:
    """A checkout in which python and kvjax only log what they are asked."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / NAME, tmp_path / NAME)
    (tmp_path / "scripts" / "setup_venv.sh").touch()
    for name in ("bin/python", "bin/kvjax"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def asked(folder: Path, *steps: str) -> list[list[str]]:
    """The commands of a run, without those that fetch and convert the model."""
    result = run(folder, *steps, PATH=f"{folder / 'bin'}:{os.environ['PATH']}")
    assert result.returncode == 0, result.stderr
    log = folder / "log"
    lines = [line.split() for line in log.read_text().splitlines()]
    log.unlink()
    assert lines[0] == ["python", "-m", "scripts.fetch_real_model"]
    assert lines[1][:2] == ["kvjax", "convert"]
    return lines[2:]


def test_the_list_has_every_grid_and_the_minutes() -> None:
    lines = run(ROOT, "--list").stdout.splitlines()
    assert {path.stem for path in (ROOT / "configs" / "smollm2").glob("*.yaml")} < set(steps())
    assert len(steps()) == len(set(steps()))
    minutes = [line.split(maxsplit=1)[1] for line in lines]
    assert all(text[0].isdigit() or text == "not recorded" for text in minutes)


def test_an_unknown_step_is_refused_before_anything_runs(stubbed: Path) -> None:
    result = run(stubbed, "tasks", "nothing")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == f"unknown step nothing: expected --list, or some of {' '.join(steps())}\n"


def test_every_step_runs_files_that_exist(stubbed: Path) -> None:
    commands = asked(stubbed)
    configs = [command[command.index("--config") + 1] for command in commands if "--config" in command]
    scripts = [f"{command[2].replace('.', '/')}.py" for command in commands if command[:2] == ["python", "-m"]]
    assert len(configs) == len(set(configs)) == len(list((ROOT / "configs" / "smollm2").glob("*.yaml")))
    assert all((ROOT / name).exists() for name in [*configs, *scripts])
    outs = [
        command[command.index("--out") + 1] for command in commands if command[1] != "report" and "--out" in command
    ]
    assert len(outs) == len(set(outs))
    trained = [command for command in commands if command[1] in ("train-gates", "measure-statistics")]
    assert [command[4] for command in trained[:3]] == ["fastkvzip", "kvzap", "duo_attention"]
    assert len(trained) == 4


def test_a_named_grid_makes_its_results_and_its_report(stubbed: Path) -> None:
    results = "runs/smollm2/tasks"
    assert asked(stubbed, "tasks") == [
        f"kvjax eval --config configs/smollm2/tasks.yaml --model data/smollm2 --data data --out {results}".split(),
        f"kvjax report {results} --overwrite".split(),
    ]


def test_grids_with_gates_train_what_is_missing(stubbed: Path) -> None:
    first, second = asked(stubbed, "train_kvzap")
    assert (first[:3], second[1]) == (["python", "-m", "scripts.gate_texts"], "train-gates")
    trained = [command[4] for command in asked(stubbed, "gates") if command[1] == "train-gates"]
    assert trained == ["fastkvzip"]
    done = asked(stubbed, "later")
    assert [command[1] for command in done if command[0] == "kvjax"] == ["measure-statistics", "eval", "report"]


def test_a_whole_table_is_not_measured_again(stubbed: Path) -> None:
    assert len(asked(stubbed, "retention")) == 1
    assert (stubbed / "runs/smollm2/retention/output.txt").read_text() == "a table\n"
    assert not asked(stubbed, "retention")

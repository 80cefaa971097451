"""Ctrl-C at random moments: the command ends at once with status 130 and one line, and nothing is half-written."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvjax
from kvjax.files.writing import NEW
from tests.cli.commands import PROMPT
from tests.patience import PATIENCE

COMMANDS = {
    "generate": ["generate", "MODEL", PROMPT, "--max-new-tokens", "9", "--policy", "snapkv:budget=64"],
    "convert": ["convert", "MODEL", "out", "--to", "orbax"],
    "inspect": ["inspect", "MODEL", "--prompt", PROMPT, "--policy", "snapkv:budget=64", "--out", "page.html"],
    "demo": ["demo"],
    "eval": ["eval", "--config", "grid.yaml", "--out", "run"],
}
GRID = "model: MODEL\ntasks: [{name: demo/needle, lengths: [64]}]\nlimit: 3\npolicies: [full]\n"
MOST = 10.0  # seconds after the start of a command
PROGRAM = [sys.executable, "-c", "from kvjax_command import main; main()"]


def interrupted(arguments: list[str], folder: Path, after: float) -> tuple[int, str]:
    """Exit status and stderr of a command that receives SIGINT some seconds after it handles it."""
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    tasks = Path(f"/proc/{process.pid}/task")
    while process.poll() is None and len(list(tasks.iterdir())) < 2:  # the second thread waits for the signal
        time.sleep(0.01)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=PATIENCE)[1]
    return process.returncode, stderr


@pytest.mark.slow(first=1)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the test finds threads in /proc")
@pytest.mark.parametrize("moments", [1, pytest.param(15, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_ends_a_command_at_any_moment(command: str, moments: int, shallow_model: str, tmp_path: Path) -> None:
    delays = random.Random(command)
    (tmp_path / "grid.yaml").write_text(GRID.replace("MODEL", shallow_model))
    arguments = [shallow_model if argument == "MODEL" else argument for argument in COMMANDS[command]]
    for _ in range(moments):
        status, stderr = interrupted(arguments, tmp_path, MOST * delays.random())
        assert status in (130, 0)  # 0: the command was done before
        assert "Traceback" not in stderr
        assert (status == 130) == stderr.endswith("kvjax: interrupted\n")
        written = {path.name for path in tmp_path.iterdir()} - {"grid.yaml", "out", "run", "demo_output"}
        assert written <= {"page.html"}
        assert {path.name for path in (tmp_path / "demo_output").glob("*")} <= {"accuracy_by_budget.png"}
        if (tmp_path / "page.html").exists():
            assert (tmp_path / "page.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
            (tmp_path / "page.html").unlink()
        if any(path.name != NEW for path in (tmp_path / "out").glob("*")):
            kvjax.restore(tmp_path / "out")
            arguments = [*arguments, *["--overwrite"] * ("--overwrite" not in arguments)]


def test_ctrl_c_while_kvjax_is_imported(tmp_path: Path) -> None:
    assert interrupted(["--help"], tmp_path, 0.2) == (130, "\nkvjax: interrupted\n")


@pytest.mark.long
def test_ctrl_c_after_a_command_is_done(tmp_path: Path) -> None:
    """Handlers run in reverse order, so this one sends the signal after all others are done."""
    late = "import atexit, os; atexit.register(os.kill, os.getpid(), 2); "
    process = subprocess.run(
        [PROGRAM[0], "-c", late + PROGRAM[2], "--help"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")

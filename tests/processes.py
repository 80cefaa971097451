"""Several processes that form one run of JAX on the CPU, each with two devices."""

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "2",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "PYTHONPATH": str(ROOT),
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def last_lines(commands: Sequence[Sequence[str]]) -> list[str]:
    """The last line that each of several processes prints, which run at once. All must succeed."""
    started = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        finished = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(stderr for _, stderr in finished)
    return [stdout.splitlines()[-1] if stdout else "" for stdout, _ in finished]

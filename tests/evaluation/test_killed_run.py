"""A run whose process is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.evaluation.test_runner import plan, right, run

KILLED = """
import os, signal, sys, time
from pathlib import Path
from tests.evaluation.test_runner import plan, right, run

def slow(batch, policies):
    for found in right(batch, policies):
        time.sleep(0.004)
        yield found

ready = plan()
for seconds in sys.stdin:
    child = os.fork()  # loading Python anew for each would take all of the time
    if child == 0:
        run(ready, slow, Path(sys.argv[1]))
        os._exit(0)
    time.sleep(float(seconds))
    os.kill(child, signal.SIGKILL)  # nothing to one that ended and was not waited for
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_file(tmp_path: Path) -> None:
    """SIGKILL at 20 random moments of runs, while they ask, write and put lines in order; then one is let finish."""
    run(plan(), right, tmp_path / "whole")
    expected = (tmp_path / "whole" / "results.jsonl").read_bytes()
    draw = random.Random(0)
    root = Path(__file__).resolve().parents[2]
    killed = tmp_path / "killed"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, killed],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        kills = 0
        while kills < 20:
            print(draw.uniform(0.001, 0.03), file=process.stdin, flush=True)
            status = int(process.stdout.readline())
            if status == 0:  # it was faster, and the next begins anew
                assert (killed / "results.jsonl").read_bytes() == expected
                shutil.rmtree(killed)
            else:
                assert status == -signal.SIGKILL
                kills += 1
        process.stdin.close()
    run(plan(), right, killed)
    assert (killed / "results.jsonl").read_bytes() == expected

"""The decoding benchmark counts the launches of a step, which needs a GPU, with kernels that are told to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import pytest

from benchmarks import bench_decode
from benchmarks.device_time import Kernel


@pytest.mark.slow
def test_launches_of_a_step_are_the_difference_of_two_loops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kernels(loop: Callable[..., Any], *arguments: Any) -> list[Kernel]:
        """Three launches for each step that the loop takes, and one before it."""
        _, steps = jax.block_until_ready(loop(*arguments))
        return [Kernel("before", 1, 1e-6), Kernel("step", 3 * int(steps), 6e-6 * int(steps))]

    monkeypatch.setattr(bench_decode, "has_cupti", lambda: True)
    monkeypatch.setattr(bench_decode, "kernels", kernels)
    monkeypatch.setattr("sys.argv", ["bench_decode", "--small", "--layers", "1", "--case", "kernels"])
    bench_decode.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [line for line in lines if line.get("case") == "kernels"]
    assert len(found) == 6
    assert all(line["launches"] == pytest.approx(3) for line in found)
    assert all(line["microseconds"] == pytest.approx(6) for line in found)

"""The decoding benchmark counts the launches of a step, which needs a GPU, with kernels that are told to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import pytest

from benchmarks import bench_decode
from benchmarks.device_time import Kernel
from kvjax.decoding import loop


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


@pytest.mark.slow
def test_the_rows_that_fit_are_planned_and_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All arrays of a batch lie within the memory, and those of one row more would not."""
    memory, most, before = 4_000_000, [], sum(x.nbytes for x in jax.live_arrays())

    def decode(*arguments: Any) -> Any:
        most.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        return loop.decode(*arguments)

    monkeypatch.setattr(bench_decode, "decode", decode)
    monkeypatch.setattr("sys.argv", ["bench_decode", "--small", "--case", "batch", "--memory", "4MB"])
    bench_decode.main()
    sides = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    snapkv, morphkv = (line for line in sides if "rows" in line)
    assert morphkv["rows"] > snapkv["rows"] > 1
    for side in (snapkv, morphkv):
        assert side["bytes"] <= memory < side["bytes"] + side["row_bytes"]
        assert side["tokens_per_second"] > 0
    assert 0.7 * memory < max(most) <= memory

"""The benchmark of the engine goes on where it was stopped, and its table says what failed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import bench_engine


def test_a_line_that_was_not_written_to_its_end_does_not_count(tmp_path: Path) -> None:
    settings = bench_engine.Settings("demo", "mixed", 4, 2, 64, 32, 0)
    out = tmp_path / "out.jsonl"
    assert bench_engine.lines_of(out, settings) == []
    for turn in range(2):
        bench_engine.write(out, asdict(settings) | {"turn": turn})
    out.write_bytes(out.read_bytes()[:-9])
    bench_engine.write(out, asdict(replace(settings, load="long")) | {"turn": 0})
    bench_engine.write(out, asdict(settings) | {"turn": 1})
    assert [line["turn"] for line in bench_engine.lines_of(out, settings)] == [0, 1]


@pytest.mark.parametrize(("load", "shortest", "least"), [("mixed", 128, 16), ("long", 128, 512), ("chat", 256, 64)])
def test_lengths_are_those_of_the_load(load: str, shortest: int, least: int) -> None:
    drawn = bench_engine.drawn(bench_engine.Settings("demo", load, 500, 8, 2048, 1024, 0), 512)
    prompts, answers = [len(one.prompt) for one in drawn], [one.new for one in drawn]
    assert shortest <= min(prompts) < 1.1 * shortest < 1900 < max(prompts) <= 2048
    assert least <= min(answers) < 1.1 * least < 950 < max(answers) <= 1024


def test_the_table() -> None:
    line = {"first_p50": 0.1, "first_p99": 0.2, "between_p50": 0.3, "between_p99": 0.4}
    lines = [
        *({"side": "static", "turn": turn, "tokens_per_second": speed} for turn, speed in enumerate([10, 20, 30])),
        *(line | {"side": "engine", "turn": turn, "tokens_per_second": 40} for turn in range(3)),
        {"side": "transformers", "turn": 0, "error": "RuntimeError: no CPU"},
        {"side": "step", "turn": 0, "ratio": 1.03},
    ]
    rows = bench_engine.table(lines).splitlines()[2:]
    assert rows == [
        "| static | 20.0 | 1.00 (1.00 to 1.00) |  |  |",
        "| engine | 40.0 | 2.00 (1.33 to 4.00) | 0.100 s / 0.200 s | 0.300 s / 0.400 s |",
        "| transformers | RuntimeError: no CPU | | | |",
        "| step over a bare step | | 1.03 (1.03 to 1.03) | | |",
    ]

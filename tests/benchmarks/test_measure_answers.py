"""The tables of long answers: divergence, repetition and speed."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import bench_answers as speeds
from benchmarks import measure_answers as answers


def test_the_table_of_answers_divides_each_answer_in_halves() -> None:
    line = {"policy": "h2o", "length": 400, "tokens_per_second": 10.04, "cache_bytes": 6_000_000}
    lines = [
        line | {"request": 0, "divergence": [0.25, 0.75, 1.0, 2.0], "repetition": 0.5},
        line | {"request": 1, "divergence": [0.5, 1.5, None, None], "repetition": 0.5, "length": 200},
    ]
    assert answers.table(lines).splitlines()[2:] == [
        "| `h2o` | 0.500 ±0.000 | 1.500 ±0.000 | 50.0 ±0.0 | 300 | 10.0 | 6.0 |"
    ]


def test_the_table_by_position_has_the_answers_that_reach_it() -> None:
    lines = [
        {"policy": "full", "divergence": [0.0] * 4},
        {"policy": "h2o", "divergence": [0.25, 0.75, 1.0, 2.0]},
        {"policy": "h2o", "divergence": [0.5, 0.5, 1.5, None]},
        {"policy": "h2o", "divergence": [0.5, None, None, None]},
    ]
    assert answers.by_position(lines).splitlines() == [
        "| KL, policy | tokens 1 to 256: 3 | tokens 257 to 512: 2 |",
        "|---|---:|---:|",
        "| `full` | 0.000 ±0.000 | 0.000 ±0.000 |",
        "| `h2o` | 0.500 ±0.000 | 1.500 ±0.000 |",
    ]


def test_the_table_of_speeds_pairs_the_policies_of_a_turn() -> None:
    found = {"full": [10.0, 20.0, 40.0], "h2o": [20.0, 30.0, 50.0]}
    lines = [
        {"policy": policy, "turn": turn, "tokens_per_second": found[policy][turn], "cache_bytes": 1_500_000}
        for turn in range(3)
        for policy in found
    ]
    assert speeds.table(lines).splitlines()[2:] == [
        "| `full` | 20.0 | 1.00 (1.00 to 1.00) | 1.5 |",
        "| `h2o` | 30.0 | 1.50 (1.25 to 2.00) | 1.5 |",
    ]


def test_speeds_are_measured_by_whole_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A turn that was stopped is measured again, because its policies are compared with each other."""
    asked: list[str] = []

    def generate(params, prompts, *, policy, **_):
        asked.append(policy)
        if len(asked) == 4:
            raise KeyboardInterrupt
        stats = SimpleNamespace(decode_tokens_per_second=len(asked), cache_bytes=2_000_000)
        return SimpleNamespace(stats=stats)

    tokenizer = SimpleNamespace(apply_chat_template=lambda *_, **__: {"input_ids": [1]})
    monkeypatch.setattr(speeds, "kvjax", SimpleNamespace(load=lambda _: (None, tokenizer), generate=generate))
    options = ["--turns", "2", "--policies", "full", "h2o:budget={budget}"]
    monkeypatch.setattr("sys.argv", ["x", "demo", "--out", str(tmp_path), *options])
    with pytest.raises(KeyboardInterrupt):
        speeds.main()
    speeds.main()
    speeds.main()
    assert asked == ["full", "h2o:budget=256"] * 3
    lines = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [(line["turn"], line["tokens_per_second"]) for line in lines] == [(0, 1), (0, 2), (1, 5), (1, 6)]

"""Files of measurements: a later call finds the lines of its setting, and an incomplete line costs that line only."""

from pathlib import Path

import pytest

from benchmarks.measured_lines import MeasuredLines

KEY = ("policy", "text")


def opened(path: Path, model: str = "a"):
    return MeasuredLines(path, {"model": model}, KEY)


def test_a_later_call_finds_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "x.jsonl"
    lines = opened(path)
    lines.append({"policy": "full", "text": i, "bits": [1.5, i]} for i in range(2))
    for each in (lines, opened(path)):
        assert ("full", 1) in each
        assert ("full", 2) not in each
        assert each["full", 1] == {"model": "a", "policy": "full", "text": 1, "bits": [1.5, 1]}
        assert [line["text"] for line in each] == [0, 1]


def test_lines_of_another_model_are_not_read_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    opened(path).append([{"policy": "full", "text": 0, "bits": 1}])
    path.write_text(path.read_text() + '{"policy": "full", "text": 1}\n')  # of an earlier version, which named no model
    other = opened(path, "b")
    assert list(other) == []
    other.append([{"policy": "full", "text": 0, "bits": 2}])
    assert [line["bits"] for line in opened(path)] == [1]
    assert [line["bits"] for line in opened(path, "b")] == [2]


def test_what_is_measured_again_replaces_the_earlier_line(tmp_path: Path) -> None:
    lines = opened(tmp_path / "x.jsonl")
    for bits in (1, 2):
        lines.append([{"policy": "full", "text": 0, "bits": bits}])
    assert [line["bits"] for line in opened(tmp_path / "x.jsonl")] == [2]


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_an_incomplete_last_line_is_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: int) -> None:
    path = tmp_path / "x.jsonl"
    opened(path).append({"policy": "full", "text": i} for i in range(3))
    path.write_bytes(path.read_bytes()[:-cut])
    lines = opened(path)
    assert [line["text"] for line in lines] == [0, 1]
    message = "line 3 of 3: it is incomplete: expected a JSON object and a line end; it is measured again"
    assert capsys.readouterr().err == f"{path}, {message}\n"
    lines.append([{"policy": "full", "text": 2}])
    assert [line["text"] for line in opened(path)] == [0, 1, 2]
    assert capsys.readouterr().err == ""

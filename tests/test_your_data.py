"""docs/guide/your_data.md: its code runs from top to bottom, and its command prints what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import kv

PAGE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "your_data.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def lines(table: str) -> list[str]:
    return [line.rstrip() for line in table.rstrip().splitlines()]


@pytest.mark.long
def test_the_page_does_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    names: dict[str, Any] = {"__name__": "docs"}
    write, run, table = blocks("python")
    exec(write, names)
    assert len((tmp_path / "questions.jsonl").read_text().splitlines()) == 20
    command = next(part for part in re.findall(r"((?:^    .*\n)+)", PAGE.read_text(), re.M) if "compare demo" in part)
    arguments = shlex.split(command.replace("\\\n", " ").strip())[1:]
    picture = arguments.index("--picture")
    status, stdout, stderr = kv(*arguments[:picture], *arguments[picture + 2 :])
    assert status == 0, stderr
    assert lines(stdout) == lines(blocks("text")[0])
    exec(run, names)
    pytest.importorskip("pandas", reason="the table needs pandas (the extra `table`)")
    exec(table, names)
    assert set(names["lost"].policy) == {"mine", "snapkv"}

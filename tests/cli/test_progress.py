"""Progress without a terminal: a line every thirty seconds."""

from __future__ import annotations

import itertools
import threading

import pytest

from kvjax.cli import console
from kvjax.cli.progress import Bar


def test_a_line_every_thirty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """A clock that goes on by four seconds each time it is asked, and twice where a line is printed."""
    seconds = itertools.count(step=4)
    with Bar("answers", clock=lambda: float(next(seconds))) as bar:
        bar.begin(2000)
        for i in range(20):
            bar.at(f"policy [b]{i}[/b]")
            bar.advance(100)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "kvjax: 800 of 2,000 answers, at policy [b]7[/b]",
        "kvjax: 1,600 of 2,000 answers, at policy [b]15[/b]",
    ]


def test_a_long_operation_writes_lines_into_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = threading.Event()
    monkeypatch.setattr(console, "EVERY", 0.01)

    def note(text: str) -> None:
        print(text)
        said.set()

    monkeypatch.setattr(console, "note", note)
    with console.working("compiling", quiet=True):
        assert not said.wait(0.1)
    with console.working("compiling"):
        assert said.wait(10)
    count = capsys.readouterr().out.count("compiling: 0 s\n")
    assert count >= 1
    said.clear()
    assert not said.wait(0.1)  # it ends with the operation

"""Progress without a terminal: a line every thirty seconds."""

from __future__ import annotations

import itertools

import pytest

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

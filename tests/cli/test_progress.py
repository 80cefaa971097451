"""Progress without a terminal: lines on stderr, which say how much is done and what is compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvjax.cli import progress
from kvjax.cli.evaluate import run_here
from kvjax.cli.progress import Bar, Line
from kvjax.evaluation import runner, worker
from kvjax.runtime.progress import Doing, tell
from tests.patience import wait_for


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds by the clock of progress, which stands still."""
    clock = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> list[str]:
    """What a line of progress has said, every hundredth of a second."""
    found: list[str] = []
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.setattr(Line, "say", lambda self, text: found.append(text))
    return found


def said(lines: list[str], text: str) -> None:
    """Waits until a text has been said."""
    wait_for(lambda: any(text in line for line in lines), lambda: f"{text!r} is not in {set(lines)}")


def test_a_long_operation_says_what_it_does(lines: list[str], now: list[float]) -> None:
    with Line("loading [b]demo[/b]"):
        said(lines, "loading [b]demo[/b]: 0:00:00")
        tell("loading the weights", 1_500_000, 6_000_000, "bytes")
        said(lines, "loading the weights: 1.50 MB of 6.00 MB, 0:00:0")
        now[0] += 3
        tell("loading the weights", 4_500_000, 6_000_000, "bytes")
        said(lines, "loading the weights: 4.50 MB of 6.00 MB, 0:00:01 left")
        tell("compiling 2 of 3 programs: a layer")
        said(lines, "compiling 2 of 3 programs: a layer: 0:00:00")
    count = len(lines)
    tell("anything")
    threading.Event().wait(0.05)
    assert len(lines) == count  # it ends with the operation


def test_a_bar_counts_its_own_units(lines: list[str]) -> None:
    with Bar("answers") as bar:
        bar.begin(2000)
        bar.at("policy [b]7[/b]")
        bar.advance(800)
        said(lines, "policy [b]7[/b]: 800 of 2,000 answers, 0:00:0")
        tell("compiling a layer")
        said(lines, "policy [b]7[/b], compiling a layer: 800 of 2,000 answers")
        tell("reading the prompt", 3, 5, "steps")
        bar.advance(200)
        said(lines, "policy [b]7[/b]: 1,000 of 2,000 answers")


def test_a_run_says_when_the_model_is_loaded(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answers come once the first prompts are read, minutes after the model is there."""

    def run(plan: object, load: Callable[[], object], out: Path, bar: Bar) -> None:
        bar.begin(190)
        load()
        said(lines, "reading the first prompts: 0 of 190 answers")

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(worker, "load_asker", lambda plan: said(lines, "loading demo: 0 of 190 answers"))
    run_here(SimpleNamespace(grid=SimpleNamespace(model="demo")), Path())


def test_the_time_left_follows_from_the_mean_speed(now: list[float]) -> None:
    """Answers come in bursts, a batch at a time: the last seconds of one say nothing about the next."""
    line = Line("answers")
    for now[0], done in ((50.0, 100), (350.0, 200), (351.0, 400)):
        line.tell(Doing("answers", done, 1000, "answers"))
    assert line.sentence() == "answers: 400 of 1,000 answers, 0:10:02 left"  # 600, after 300 in 301 seconds


def test_lines_go_to_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.001)
    printed = {"out": "", "err": ""}

    def complete() -> bool:
        for name, text in capsys.readouterr()._asdict().items():
            printed[name] += text
        return "\n" in printed["err"]

    with Line("compiling"):
        wait_for(complete, lambda: "nothing was printed")
    assert printed["out"] == ""
    assert printed["err"].startswith("kvjax: compiling: 0:00:00\n")

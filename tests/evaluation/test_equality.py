"""The process that compares answers: hostile texts, threads, and a process that is gone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvjax.evaluation import equality
from kvjax.evaluation.equality import Worker, equal

pytest.importorskip("math_verify", reason="answers in LaTeX need math-verify (the extra `eval`)")


@pytest.mark.long
def test_hostile_texts_are_unequal_and_end() -> None:
    for text in ("9^{9^{9^9}}", r"\prod_{k=1}^{10000000} k", "(" * 900):
        assert not equal(text, "5", seconds=0.5)
        assert equal("10/2", "5")  # by a new process
    for text in ("", "\x00", "\ud800", "{" * 20, "\\frac{", "$", "#", '"\n"', "__import__('os')", "5" * 2_000):
        assert not equal(text, "5")
    assert equal("(" * 5_000, "(" * 5_000)


def test_threads_share_the_process() -> None:
    with ThreadPoolExecutor(4) as threads:
        pairs = [(str(i % 7), f"{i % 5}.0") for i in range(70)]
        assert list(threads.map(lambda pair: equal(*pair), pairs)) == [i % 7 == i % 5 for i in range(70)]


@pytest.mark.long
def test_a_process_that_is_gone_is_replaced() -> None:
    worker = Worker()
    assert worker.compare("1/2", "0.5", 20)
    first = worker._process
    assert first is not None
    first.kill()
    first.wait()
    assert worker.compare("1/2", "0.5", 20)
    assert worker._process is not first
    worker.end()
    worker.end()


def test_a_process_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    with pytest.raises(ImportError, match="math-verify cannot be used: its process did not start"):
        worker.compare("1", "2", 20)
    monkeypatch.setattr(equality, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs math-verify: expected"):
        worker.compare("1", "2", 20)

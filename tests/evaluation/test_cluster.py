"""Runs on Ray: workers that die or cannot start, the division of the work, and addresses that lead nowhere."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvjax.checks import installs
from kvjax.evaluation.batches import ReadingBatch
from kvjax.evaluation.cluster import TRIES, Places, answer, connected, pieces
from kvjax.evaluation.planning import RunPlan
from kvjax.evaluation.runner import record
from kvjax.evaluation.sweeping import Task
from tests.evaluation.test_runner import GRID, Notes, plan, right, run

ROOT = Path(__file__).resolve().parents[2]
KILLS = 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[ModuleType]:
    """A cluster on this machine, whose workers find kvjax and the tests."""
    pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.setenv("JAX_PLATFORMS", "cpu")
    with connected("local") as ray:
        yield ray
    patch.undo()


def until(there: Callable[[], bool]) -> None:
    """Waits for minutes: Ray's workers have a low priority, and beside other tests they start slowly."""
    for _ in range(12_000):
        if there():
            return
        time.sleep(0.05)
    raise AssertionError("it took more than ten minutes")


def mortal(folder: Path) -> Callable[[RunPlan], Any]:
    """Loads what answers like `right`. The first worker waits for a kill at each batch, all others to be killed.

    Two workers die of a batch at most, whichever worker takes it next: a third death would end it with an error.
    """

    def load(_: RunPlan) -> Any:
        try:
            (folder / "first").touch(exist_ok=False)
            first = True
        except FileExistsError:
            first = False
        calls = 0

        def ask(batch: ReadingBatch, policies: Sequence[Any]) -> Any:
            nonlocal calls
            calls += 1
            if first:
                until(lambda: len(kills(folder)) >= min(calls, KILLS))
            elif len(kills(folder)) < KILLS and len(list(folder.glob(f"victim-{name(batch)}-*"))) < TRIES - 1:
                (folder / f"victim-{name(batch)}-{os.getpid()}").touch()
                until(lambda: (folder / "over").exists())
            return right(batch, policies)

        return ask

    return load


def name(batch: ReadingBatch) -> int:
    """A number of a batch, the same in each process."""
    reading = batch.readings[0]
    return zlib.crc32(reading.prompt.tobytes() + reading.asks[0].lead.tobytes())


def kills(folder: Path) -> list[Path]:
    return list(folder.glob("killed-*"))


def kill_victims(folder: Path) -> None:
    """Kills every worker that waits for it, five times."""
    try:
        for count in range(KILLS):
            kill_one(folder, count)
    finally:
        (folder / "over").touch()


def kill_one(folder: Path, count: int) -> None:
    """Kills the worker that waits for it after `count` others."""
    until(lambda: len(list(folder.glob("victim-*"))) > count)
    dead = {path.name.rpartition("-")[2] for path in kills(folder)}
    (victim,) = {path.name.rpartition("-")[2] for path in folder.glob("victim-*")} - dead
    os.kill(int(victim), signal.SIGKILL)
    (folder / f"killed-{victim}").touch()


@pytest.mark.slow
def test_a_worker_that_is_killed_five_times_changes_nothing(tmp_path: Path, cluster: ModuleType) -> None:
    run(plan(), right, tmp_path / "alone")
    folder, notes = tmp_path / "workers", Notes()
    folder.mkdir()
    killer = threading.Thread(target=kill_victims, args=(folder,))
    killer.start()
    work = partial(answer, cluster, plan(), workers=2, load=mortal(folder))
    summary = record(plan(), work, tmp_path / "ray", notes)
    killer.join()
    assert summary.errors == ()
    assert summary.new == summary.planned == notes.done
    assert len([text for text in notes.said if "another one goes on with its task" in text]) == KILLS
    assert len(kills(folder)) == KILLS
    outs = (tmp_path / "alone", tmp_path / "ray")
    assert len({(out / "results.jsonl").read_bytes() for out in outs}) == 1
    timings = [(out / "timings.jsonl").read_text().count("\n") for out in outs]
    assert timings[0] == timings[1]
    assert record(plan(), partial(answer, cluster, plan(), load=mortal(folder)), tmp_path / "ray").new == 0


@pytest.mark.slow
def test_workers_that_cannot_work(tmp_path: Path, cluster: ModuleType) -> None:
    def refuses(_: RunPlan) -> Any:
        raise ValueError("no such folder")

    def dies(_: RunPlan) -> Any:
        def ask(batch: Any, policies: Any) -> Any:
            if batch.readings[0].asks[0].item.task.name == "demo/keys":
                os._exit(1)
            return right(batch, policies)

        return ask

    small = plan(GRID.but(policies=["full"], question="after", limit=1).limited(1))
    with pytest.raises(ValueError, match="no worker could load the model; the last one said: ValueError: no such fol"):
        record(small, partial(answer, cluster, small, workers=1, load=refuses), tmp_path / "refuses")
    with pytest.raises(ValueError, match="3 workers died without an answer, the last one of: "):
        record(small, partial(answer, cluster, small, workers=1, load=dies), tmp_path / "dies")


def test_places_are_groups_of_devices() -> None:
    def node(alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"Alive": alive, "Resources": {"CPU": 8.0, "memory": 1e9} | resources}

    cpus = [node(), node(), node(alive=False)]
    assert Places.of(cpus, 1, None).count == 2
    assert Places.of(cpus, 1, 5).count == 5
    gpus = [node(GPU=8.0), node(GPU=6.0), node()]
    assert Places.of(gpus, 4, None) == Places(3, {"num_cpus": 0, "num_gpus": 4})
    assert Places.of(gpus, 4, 2).count == 2
    assert Places.of([node(TPU=4.0)] * 3, 2, 100) == Places(6, {"num_cpus": 0, "resources": {"TPU": 2}})
    with pytest.raises(ValueError, match="a mesh of 16 devices, but the machines of the cluster have at most 8 of kin"):
        Places.of(gpus, 16, None)


def test_pieces_are_batches_or_several_where_rows_are_refilled() -> None:
    asked = tuple((name, ("cell",)) for name in "abcdefghijk")

    def sizes(refilled: bool, actors: int) -> list[int]:
        made = pieces(Task(3, refilled, asked), actors)
        assert tuple(one for piece in made for one in piece.asked) == asked
        assert {(piece.sweep, piece.refilled) for piece in made} == {(3, refilled)}
        return [len(piece.asked) for piece in made]

    assert sizes(False, 2) == [1] * 11
    assert sizes(True, 4) == [3, 3, 3, 2]
    assert sizes(True, 1) == [8, 3]


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("ray://head:10001", "ray 'ray://head:10001': expected local, auto or HOST:PORT"),
        ("head", "expected local, auto or HOST:PORT"),
        ("head:0", "expected local, auto or HOST:PORT"),
        ("", "ray '': expected local, auto or HOST:PORT"),
        ("127.0.0.1:9", "ray 127.0.0.1:9 does not answer (.*): expected the address that `ray start --head` printed"),
        ("no such host:6379", "does not answer"),
    ],
)
def test_addresses_that_lead_nowhere(address: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # not reached
    with pytest.raises(ValueError, match=problem), connected(address):
        pass


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    problem = re.escape(f"--ray needs the package ray: expected {installs('ray')}")
    with pytest.raises(ValueError, match=problem), connected("local"):
        pass

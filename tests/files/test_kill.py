"""Writers that are killed by SIGKILL at random moments leave the old content or the new."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvjax.files.writing import write_file
from tests.files.test_writing import WRITERS, Writer, assert_mine, put_mine
from tests.patience import PATIENCE

# Processes are forked from one that has imported the writers and the settings of tests. JAX has not begun to run in it.
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(["tests.conftest", "tests.files.test_kill"])

PAGES = ("<p>one</p>" * 100_000, "<p>two</p>" * 100_000)


def write_page(folder: Path, version: int, overwrite: bool = False) -> None:
    write_file(folder / "page.html", PAGES[version])


EACH = {
    **WRITERS,
    "page": Writer(write_page, lambda folder: PAGES.index((folder / "page.html").read_text(encoding="utf-8"))),
}


def write_for_ever(name: str, folder: Path, ready: Connection) -> None:
    """Overwrites one version by the other. After the first round it sends the seconds that a round takes."""
    for round_ in itertools.count():
        begin = time.monotonic()
        for version in (1, 0):
            EACH[name].write(folder, version, overwrite=True)
        if round_ == 1:
            ready.send(time.monotonic() - begin)


def kill_one(name: str, folder: Path, share: float) -> None:
    """Kills a writer after a share of a round."""
    receiver, sender = server.Pipe(duplex=False)
    process = server.Process(target=write_for_ever, args=(name, folder, sender), daemon=True)
    process.start()
    try:
        assert receiver.poll(PATIENCE), f"{name} has not written anything"
        time.sleep(share * receiver.recv())
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -9


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("moments", [2, pytest.param(50, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", EACH)
def test_a_kill_leaves_the_old_or_the_new(name: str, moments: int, tmp_path: Path) -> None:
    writer, folder, shares = EACH[name], tmp_path / "out", random.Random(name)
    put_mine(folder)
    versions = []
    for version in (1, 0):
        writer.write(folder, version, overwrite=True)
        versions.append(writer.read(folder))
    for _ in range(moments):
        kill_one(name, folder, shares.random())
        assert_mine(folder)
        assert writer.read(folder) in versions
    writer.write(folder, 1, overwrite=True)
    assert writer.read(folder) == versions[0]

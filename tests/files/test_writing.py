"""Writers: each refuses a folder that is not empty, and a kill or a full disk leaves the old content or the new."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

import kvjax
from kvjax.checkpoint import plan_conversion
from kvjax.evaluation.report import page
from kvjax.evaluation.report.results import read_results
from kvjax.files.writing import NEW, WHOLE, check_file, check_folder, finish, new_folder, write_file
from kvjax.models import Decoder
from tests.checkpoint.folders import decoder
from tests.evaluation.test_report import write as write_run
from tests.faults import Killed, after, full, kill

DATA = re.compile(r"(?<=/d/)[0-9a-f]{32}")  # Orbax draws these names
OWNED = re.compile(r"one|two|deep/(one|two)|last")


@cache
def model(layers: int) -> Decoder:
    return decoder(num_hidden_layers=layers)


@cache
def document(tokens: int) -> kvjax.KVCache:
    return kvjax.prefill(model(1), [list(range(tokens))], policy="full")


def leaves(tree: Any) -> list[bytes]:
    return [bytes(leaf) for leaf in jax.tree.leaves(tree)]


def content(folder: Path) -> dict[str, bytes]:
    finish(folder)
    files = (path for path in folder.rglob("*") if path.is_file() and NEW not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def write_plain(folder: Path, version: int, overwrite: bool = False) -> None:
    """Two versions have files in common, and each has one that the other lacks, in a folder and beside it."""
    with new_folder(folder, OWNED, "last", overwrite=overwrite) as new:
        (new / "deep").mkdir(parents=True)
        for name in (("one", "deep/two", "last"), ("two", "deep/one", "deep/two", "last"))[version]:
            (new / name).write_text(f"{version}")


def write_hf(folder: Path, version: int, overwrite: bool = False) -> None:
    kvjax.save_hf(model(1 + version), folder, max_shard_bytes=(10**9, 5000)[version], overwrite=overwrite)


def write_orbax(folder: Path, version: int, overwrite: bool = False) -> None:
    kvjax.save(model(1 + version), folder, overwrite=overwrite)


def write_cache(folder: Path, version: int, overwrite: bool = False) -> None:
    kvjax.save_cache(folder, document(3 + version), model(1), overwrite=overwrite)


def convert(folder: Path, version: int, overwrite: bool = False) -> None:
    """From one form to the other: the second version replaces the weights of the first one."""
    source = folder.parent / f"source{version}"
    if not source.exists():
        (kvjax.save_hf, kvjax.save)[version](model(1 + version), source)
        (source / "generation_config.json").write_text(f'{{"version": {version}}}')
    plan_conversion(source, folder, ("orbax", "hf")[version], overwrite=overwrite).run()


def report(folder: Path, version: int, overwrite: bool = False) -> None:
    run = folder.parent / f"run{version}"
    if not run.exists():
        write_run(run, title=f"version {version}")
    page.write(folder, read_results([run]), ((), ("h2o",))[version], pytest.fail, overwrite)


def read_converted(folder: Path) -> list[bytes]:
    read = kvjax.restore if kvjax.checkpoint.form_of(folder) == "orbax" else kvjax.load
    return [*leaves(read(folder)[0]), (folder / "generation_config.json").read_bytes()]


def failure(step: int, fault: Callable[[str], None], folder: Path, write: Callable[[], None]) -> str | None:
    """The message of the error of a writer that meets a fault after some steps; None if it is done before."""
    try:
        with after(step, fault, folder):
            write()
    except (Killed, OSError) as error:
        return str(error)
    return None


class Writer(NamedTuple):
    write: Callable[..., None]
    read: Callable[[Path], Any]


WRITERS = {
    "plain": Writer(write_plain, lambda folder: content(folder)),
    "save_hf": Writer(write_hf, lambda folder: leaves(kvjax.load(folder)[0])),
    "save": Writer(write_orbax, lambda folder: leaves(kvjax.restore(folder)[0])),
    "save_cache": Writer(write_cache, lambda folder: leaves(kvjax.restore_cache(folder, model(1)))),
    "convert": Writer(convert, read_converted),
    "report": Writer(report, lambda folder: content(folder)),
}
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("plain", "save_hf") else pytest.mark.slow) for name in WRITERS]
)
MINE = {"my_notes.txt": b"mine", "params/my_notes.txt": b"mine too"}


def put_mine(folder: Path) -> None:
    for name, data in MINE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def assert_mine(folder: Path) -> None:
    assert {name: (folder / name).read_bytes() for name in MINE} == MINE


@EACH
def test_a_folder_that_is_not_empty_is_refused_and_other_files_stay(name: str, tmp_path: Path) -> None:
    writer, folder = WRITERS[name], tmp_path / "out"
    put_mine(folder)
    with pytest.raises(ValueError, match=r"out is not empty, it holds my_notes.txt and 1 more: .* overwrite=True") as e:
        writer.write(folder, 0)
    assert "\n" not in str(e.value)
    assert {path.name for path in folder.rglob("*")} == {"my_notes.txt", "params"}
    writer.write(folder, 0, overwrite=True)
    old, data = writer.read(folder), {name for name in content(folder) if DATA.search(name)}
    writer.write(folder, 1, overwrite=True)
    assert_mine(folder)
    writer.write(tmp_path / "fresh", 1)
    assert writer.read(folder) != old
    fresh, found = content(tmp_path / "fresh"), content(folder)
    assert not data & found.keys()  # nothing is left of the first version
    assert {DATA.sub("", name) for name in found} == {DATA.sub("", name) for name in (*fresh, *MINE)}
    if name not in ("save", "save_cache"):
        assert found == fresh | MINE


@pytest.mark.parametrize("fault", [kill, full])
@EACH
def test_a_fault_leaves_the_old_or_the_new(name: str, fault: Callable[[str], None], tmp_path: Path) -> None:
    """The reader finds one of the two, and the next writer repairs what is left.

    The plain folder is tried at every step of overwriting it, the others at some, because each takes a second.
    """
    writer, folder = WRITERS[name], tmp_path / "out"
    found = []
    for version in (1, 0):
        put_mine(folder)
        writer.write(folder, version, overwrite=True)
        found.append(writer.read(folder))
    new, old = found
    shutil.copytree(folder, tmp_path / "before")
    with after(10**9, fault, folder) as steps:
        writer.write(folder, 1, overwrite=True)
    total = steps()
    outcomes = []
    for step in range(0, total, 1 if name == "plain" else total // 3):
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "before", folder)
        message = failure(step, fault, folder, lambda: writer.write(folder, 1, overwrite=True))
        if message is None:  # Orbax's threads take other numbers of steps every time
            continue
        if fault is full:
            assert str(folder) in message
            assert len(message.splitlines()) == 1
            assert not (folder / NEW).exists()
        assert_mine(folder)
        outcomes.append(writer.read(folder))
        assert outcomes[-1] in (old, new)
    writer.write(folder, 1, overwrite=True)
    assert writer.read(folder) == new
    assert outcomes[0] == old
    if name not in ("save", "save_cache"):
        assert outcomes == sorted(outcomes, key=lambda outcome: outcome == new)  # from one rename on, it is the new one
    if name == "plain" and fault is kill:
        assert outcomes[-1] == new


@pytest.mark.parametrize("fault", [kill, full])
def test_a_fault_in_a_new_folder_leaves_nothing_that_is_in_the_way(
    fault: Callable[[str], None], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    for step in itertools.count():
        if failure(step, fault, folder, lambda: write_plain(folder, 0)) is None:
            break
        assert fault is kill or not folder.exists() or (folder / WHOLE).exists()
        write_plain(folder, 0, overwrite=(folder / WHOLE).exists() or (folder / "last").exists())
        assert {path.name for path in folder.iterdir()} == {"one", "deep", "last"}
        shutil.rmtree(folder)


@pytest.mark.parametrize("fault", [kill, full])
def test_a_fault_leaves_the_old_or_the_new_file(fault: Callable[[str], None], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    for step in itertools.count():
        path.write_text("old")
        message = failure(step, fault, tmp_path, lambda: write_file(path, "new"))
        if message is None:
            break
        assert path.read_text() == "old"
        assert fault is kill or (str(path) in message and len(list(tmp_path.iterdir())) == 1)
    assert path.read_text() == "new"
    assert step > 0


@pytest.mark.parametrize("check", [check_file, check_folder])
def test_a_text_is_no_truth(check: Callable[..., None], tmp_path: Path) -> None:
    """overwrite="no" overwrites nothing."""
    with pytest.raises(ValueError, match="overwrite='no': expected True or False"):
        check(tmp_path / "new", "no")


def test_a_file_that_exists_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    check_file(path, overwrite=False)
    path.touch()
    check_file(path, overwrite=True)
    with pytest.raises(ValueError, match=r"page.html exists: expected a file that does not, or --overwrite"):
        check_file(path, False, "--overwrite")
    with pytest.raises(ValueError, match="is no regular file"):
        check_file(tmp_path, overwrite=True)
    with pytest.raises(ValueError, match="/no is not a folder; expected a file in an existing folder"):
        check_file(tmp_path / "no" / "page.html", overwrite=True)


def test_what_is_in_the_way_is_named_before_anything_changes(tmp_path: Path) -> None:
    for name in ("one/mine", "deep"):
        folder = tmp_path / name.partition("/")[0]
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text("mine")
        with pytest.raises(ValueError, match=f"{folder / name.partition('/')[0]} is in the way"):
            write_plain(folder, 0, overwrite=True)
        assert content(folder) == {name: b"mine"}
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file: expected a folder"):
        write_plain(tmp_path / "file", 0, overwrite=True)


def test_a_place_that_this_user_cannot_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is computed that would be lost."""
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    for name in (".", "a/b"):
        with pytest.raises(PermissionError, match=f"{tmp_path}'$"):
            check_folder(tmp_path / name, overwrite=True)
    with pytest.raises(PermissionError, match=f"{tmp_path}'$"):
        check_file(tmp_path / "page.html", overwrite=True)


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    with new_folder(tmp_path, OWNED, "last", overwrite=False) as new:
        with pytest.raises(ValueError, match="another process is writing"):
            write_plain(tmp_path, 0)
        new.mkdir()
        (new / "last").write_text("first")
    assert content(tmp_path) == {"last": b"first"}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("save", [kvjax.save, kvjax.save_hf])
def test_a_write_that_the_system_refuses_is_one_line(save: Callable[..., None], tmp_path: Path) -> None:
    """TensorStore writes in C++, where no audit hook is asked: here the system refuses files of more than 100 kB."""
    resource = pytest.importorskip("resource", reason="limits of a process are POSIX")
    params, before = decoder(vocab_size=4000), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path / 'out'}'") as caught:
            save(params, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()

"""Writes files and folders so that readers find the old content or the new content, never a half.

A file is written beside its place and renamed. A folder is written into its hidden subfolder `.kvjax-new`. Once that is
whole, it is renamed to `.kvjax-whole`, and from then on the new content counts: its files move up one by one, and
`finish` resumes the moves after a kill.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from kvjax.checks import check_truth, path_of

if sys.platform != "win32":
    import fcntl

NEW, WHOLE = ".kvjax-new", ".kvjax-whole"
CONTENT, NOTE = "content", "note.json"  # within both of them: what is written, and how it is put in place
OVERWRITE = "overwrite=True"


class BusyError(ValueError):
    """Another process, or another thread, is writing the folder."""


def check_file(path: Path, overwrite: bool, argument: str = OVERWRITE) -> None:
    """Checks a file to write.

    Args:
        path: the file.
        overwrite: whether there may be such a file.
        argument: what the user sets to overwrite it, for the message.

    Raises:
        ValueError: the file exists and `overwrite` is False, there is something else of that name, or its folder does
            not exist.
        PermissionError: this user cannot write its folder.
    """
    check_truth("overwrite", overwrite)
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: {path.parent} is not a folder; expected a file in an existing folder")
    _check_writable(path.parent)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no regular file: expected a file")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists: expected a file that does not, or {argument}")


def check_folder(folder: Path, overwrite: bool, argument: str | None = OVERWRITE) -> None:
    """Checks a folder to write.

    Args:
        folder: the folder.
        overwrite: whether it may hold files.
        argument: what the user sets to overwrite them, for the message; None if there is nothing.

    Raises:
        ValueError: the folder is not empty and `overwrite` is False, or it, or what it would be in, is a file.
        PermissionError: this user cannot write it, or what it would be in.
    """
    check_truth("overwrite", overwrite)
    _check_writable(next(path for path in (folder, *folder.absolute().parents) if path.exists()))
    inside = sorted(path.name for path in folder.iterdir() if path.name != NEW) if folder.exists() else []
    if inside and not overwrite:
        held = inside[0] if len(inside) == 1 else f"{inside[0]} and {len(inside) - 1} more"
        or_what = "" if argument is None else f", or {argument}, which replaces only the files that kvjax writes"
        raise ValueError(f"{folder} is not empty, it holds {held}: expected an empty or absent folder{or_what}")


def _check_writable(folder: Path) -> None:
    """Raises ValueError unless a path is a folder, and PermissionError unless this user may create files in it."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: expected a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a path to write, and renames it to `path` at the end. After an exception `path` is as it was.

    Raises:
        OSError: the file cannot be written. The error names it.
    """
    place = Path(path).resolve()
    new = place.with_name(f"{NEW}.{secrets.token_hex(4)}.{place.name}")  # matplotlib goes by the suffix
    try:
        with _named(place):
            yield new
            _sync(new)
            os.replace(new, place)
            _sync(place.parent)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def write_file(path: str | os.PathLike[str], content: str) -> None:
    """Writes a text in UTF-8 through `new_file`. Raises OSError."""
    with new_file(path) as new:
        new.write_text(content, encoding="utf-8")


@contextmanager
def new_folder(
    path: str | os.PathLike[str], owned: re.Pattern[str], last: str, *, overwrite: bool, argument: str = OVERWRITE
) -> Iterator[Path]:
    """Yields a path at which to create a folder, and moves the files of that folder into `path` at the end.

    After an exception, `path` is as it was. With several processes, all of them must call this function. The first one
    checks, locks and moves; the others may write to the yielded path if they can access it.

    Args:
        path: the folder to write.
        owned: matches the files that the format owns, relative to the folder and with forward slashes. Those that are
            not written again are removed. All other files stay.
        last: the file that moves last. Without it, readers that do not know this module find nothing to read.
        overwrite: whether the folder may hold files.
        argument: what the user sets to overwrite them, for the message.

    Raises:
        ValueError: the folder is not empty and `overwrite` is False, something that the format does not own is in the
            way, or another process is writing the folder.
        OSError: the folder or a file cannot be written. The error names it.
    """
    folder = path_of("path", path).resolve()
    first = jax.process_index() == 0
    with ExitStack() as stack:
        refusal: ValueError | OSError | None = None
        if first:
            try:
                check_folder(folder, overwrite, argument)
                stack.enter_context(_staged(folder))
            except (ValueError, OSError) as error:
                refusal = error
        if _anywhere(refusal is not None):
            raise refusal or ValueError(f"the first process cannot write {folder}: its error says why")
        yield folder / NEW / CONTENT
        _wait(f"kvjax wrote {folder / NEW}")
        if first:
            _commit(folder, owned, last)
        _wait(f"kvjax moved {folder / NEW}")


def finish(folder: Path) -> None:
    """Moves new content into place if a process was killed while it did so. Call it before reading a folder.

    Raises:
        OSError: the folder cannot be written, or there are several processes, which would disturb each other.
    """
    if (folder / WHOLE).is_dir():
        if jax.process_count() > 1:
            raise OSError(f"{folder} was not put in place completely: read it once with a single process")
        with _lock(folder, wait=True):
            _install(folder)


@contextmanager
def _staged(folder: Path) -> Iterator[None]:
    """Creates and locks a folder, with an empty `.kvjax-new`, and removes what it created after an exception."""
    created = not folder.exists()
    with _named(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with _lock(folder):
                _install(folder)
                if (folder / NEW).exists():
                    shutil.rmtree(folder / NEW)
                (folder / NEW).mkdir()
                try:
                    yield
                except BaseException:
                    _clear(folder / NEW)
                    raise
        except BaseException:
            if created and not any(folder.iterdir()):
                folder.rmdir()
            raise


def _clear(folder: Path) -> None:
    """Removes a folder, to which threads of Orbax may still be writing: they go on for a moment after an error."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.05)


def _commit(folder: Path, owned: re.Pattern[str], last: str) -> None:
    """Makes the content of `.kvjax-new` count, and moves it into place."""
    content = folder / NEW / CONTENT
    new = _files(content)
    for name in new:
        _check_way(folder, name)
    stale = [name for name in _files(folder) if owned.fullmatch(name) and name not in new]
    (folder / NEW / NOTE).write_text(json.dumps({"last": last, "stale": stale}), encoding="utf-8")
    for name in new:
        _sync(content / name)
    for path in {(content / name).parent for name in new} | {folder / NEW / NOTE, content, folder / NEW}:
        _sync(path)
    os.replace(folder / NEW, folder / WHOLE)
    _sync(folder)
    _install(folder)


def _install(folder: Path) -> None:
    """Moves the files of `.kvjax-whole` into place. Each step may have been done before."""
    whole, content = folder / WHOLE, folder / WHOLE / CONTENT
    if (whole / NOTE).exists():  # it goes when all files are in place
        note = json.loads((whole / NOTE).read_text(encoding="utf-8"))
        last = note["last"]
        if (content / last).exists():
            _remove(folder, last)
            _sync(folder)
        for name in note["stale"]:
            _remove(folder, name)
        names = sorted(_files(content), key=lambda name: (name == last, name))
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(content / name, folder / name)
        for path in {(folder / name).parent for name in names} | {folder}:
            _sync(path)
        (whole / NOTE).unlink()
    if whole.exists():
        shutil.rmtree(whole)


def _remove(folder: Path, name: str) -> None:
    """Removes a file, and the folders in `folder` that it leaves empty."""
    place = folder / name
    place.unlink(missing_ok=True)
    for parent in place.parents[: len(Path(name).parents) - 1]:
        if parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()


def _files(folder: Path) -> list[str]:
    """The files in a folder, relative to it. Links to folders are not followed, and `.kvjax-*` is left out."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in (NEW, WHOLE)]
        found += [(Path(root) / name).relative_to(folder).as_posix() for name in names]
    return sorted(found)


def _check_way(folder: Path, name: str) -> None:
    """Raises ValueError if a file cannot move to its place because of something that is not kvjax's."""
    if (folder / name).is_dir():
        raise ValueError(f"{folder / name} is in the way: expected a file or nothing; move it, or write elsewhere")
    for parent in Path(name).parents[:-1]:
        place = folder / parent
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise ValueError(f"{place} is in the way: expected a folder or nothing; move it, or write elsewhere")


@contextmanager
def _lock(folder: Path, wait: bool = False) -> Iterator[None]:
    """Locks a folder against other writers, where the file system has locks. Raises BusyError if one is writing."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not lock(descriptor, wait):
            raise BusyError(f"another process is writing {folder}: expected one at a time")
        yield
    finally:
        os.close(descriptor)


def lock(descriptor: int, wait: bool = False) -> bool:
    """Locks an open file or folder against others until it is closed. Returns False if somebody else has the lock.

    Where the system or the file system has no locks, nobody has one.
    """
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # a network file system without locks
        pass
    return True


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Adds the path to errors of writing, such as a full disk, which otherwise name no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync(path: Path) -> None:
    """Returns when a file, or the list of names of a folder, is on the disk."""
    if path.is_dir() and sys.platform == "win32":  # it cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _anywhere(fact: bool) -> bool:
    """Returns whether a fact holds in any process. It returns when all processes have asked."""
    return bool(multihost_utils.process_allgather(np.array(fact)).any()) if jax.process_count() > 1 else fact


def _wait(step: str) -> None:
    """Returns when every process has reached `step`."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(step)

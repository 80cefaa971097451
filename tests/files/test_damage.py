"""Saved caches that were damaged: any flipped bit and any cut file is one clear error that names the file."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.checkpoint import CheckpointError
from kvjax.files.checksums import NAME, damages, write_checksums
from kvjax.models import Decoder

DAMAGES = 20  # of each seed: 400 in all


@pytest.fixture(scope="module", params=["morphkv:budget=8,window=2", "kvcompose:budget=8"])
def saved(request: pytest.FixtureRequest, tiny: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of slots with a policy's state, and one of segments."""
    path = tmp_path_factory.mktemp("saved") / "cache"
    kvjax.save_cache(path, kvjax.prefill(tiny, [list(range(1, 20)), [4, 2]], policy=request.param), tiny)
    return path


def flip(data: bytes, rng: np.random.Generator) -> bytes:
    place, bit = int(rng.integers(len(data))), int(rng.integers(8))
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: int(rng.integers(len(data)))]


def noise(data: bytes, rng: np.random.Generator) -> bytes:
    start = int(rng.integers(len(data)))
    return data[:start] + rng.bytes(min(16, len(data) - start)) + data[start + 16 :]


def longer(data: bytes, rng: np.random.Generator) -> bytes:
    return data + rng.bytes(16)


def damage(folder: Path, rng: np.random.Generator) -> str:
    """Damages one file, or removes it, and returns its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = files[int(rng.integers(len(files)))]
    way: Callable[[bytes, np.random.Generator], bytes] | None = [flip, flip, cut, noise, longer, None][rng.integers(6)]
    if way is None:
        path.unlink()
    else:
        path.write_bytes(way(path.read_bytes(), rng))
    return path.relative_to(folder).as_posix()


@pytest.mark.long
@pytest.mark.slow(first=2)
@pytest.mark.parametrize("seed", range(10))
def test_any_damage_is_one_error(tiny: Decoder, saved: Path, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for i in range(DAMAGES):
        copy = shutil.copytree(saved, tmp_path / str(i))
        name = damage(copy, rng)
        with pytest.raises(CheckpointError, match=f"^cannot load {copy}: ") as caught:
            kvjax.restore_cache(copy, tiny)
        assert name == NAME or [problem.split()[0] for problem in caught.value.problems] == [name]


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a", "deep/b", "c"):
        (tmp_path / name).write_text(name)
    write_checksums(tmp_path)
    owned = re.compile("[abc]|deep/.*")
    assert damages(tmp_path, owned) == []
    (tmp_path / "mine").touch()
    (tmp_path / "c").write_text("d")
    (tmp_path / "deep" / "b").rename(tmp_path / "deep" / "e")
    assert damages(tmp_path, owned) == ["deep/b is missing", "c is not what was saved", "deep/e has no checksum"]
    (tmp_path / NAME).write_bytes(b"\xff")
    assert damages(tmp_path, owned) == [f"it has no {NAME} that can be read"]


@pytest.mark.slow(first=1)
@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum of coreutils")
def test_the_form_of_the_checksums_is_that_of_coreutils(saved: Path) -> None:
    assert subprocess.run(["sha256sum", "--check", "--quiet", NAME], cwd=saved, check=False).returncode == 0

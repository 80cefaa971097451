"""The package as it is installed: the files of a wheel, imports without optional packages, and linked folders."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("models", "pallas_kernels")  # folders that kvjax/ links to


def files(folder: Path) -> Iterator[Path]:
    """All files below `folder`, links not followed, without caches and hidden files."""
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            yield path


def python_files() -> list[Path]:
    skipped = {"build", "dist"}
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in skipped and path.name[0] != "."]
    found = [path for folder in folders for path in files(folder) if path.suffix == ".py"]
    return sorted(path.relative_to(ROOT) for path in found)


def run_python(code: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kvjax in a folder of its own, from a wheel that was built from a source distribution of a copy of the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    source, dist, target = folder / "source", folder / "dist", folder / "target"
    ignore = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "demo_output")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)

    def module(*arguments: object) -> None:
        result = subprocess.run([sys.executable, "-m", *map(str, arguments)], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr

    module("build", "--no-isolation", "--outdir", dist, source)
    assert len(list(dist.glob("*.tar.gz"))) == 1
    (wheel,) = dist.glob("*.whl")
    module("pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def test_wheel_installs_no_top_level_module_but_kvjax_and_its_command(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names - {"__pycache__"} == {"kvjax", "kvjax_command.py", "bin"}


def test_wheel_holds_every_file_of_the_package_and_no_links(installed: Path) -> None:
    expected = {path.relative_to(ROOT) for path in files(ROOT / "kvjax") if not path.is_symlink()}
    expected |= {"kvjax" / path.relative_to(ROOT) for name in LINKED for path in files(ROOT / name)}
    got = {path.relative_to(installed) for path in files(installed / "kvjax")}
    assert got == expected
    assert not [path for path in installed.rglob("*") if path.is_symlink()]


def test_wheel_imports_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    code = "import kvjax.models as m, kvjax.pallas_kernels as p; print(m.__file__, p.__file__, sep='\\n')"
    imported = run_python(code, cwd=tmp_path, PYTHONPATH=str(installed)).splitlines()
    assert [Path(path).resolve() for path in imported] == [
        (installed / "kvjax" / name / "__init__.py").resolve() for name in LINKED
    ]


def test_imports_without_torch_and_matplotlib(tmp_path: Path) -> None:
    code = """
import importlib, pkgutil, sys
sys.modules.update(torch=None, matplotlib=None)
import kvjax
for module in pkgutil.walk_packages(kvjax.__path__, "kvjax."):
    if not module.name.endswith(("__main__", "lm_eval_model")):  # the second is a plugin of what it imports
        importlib.import_module(module.name)
        print(module.name)
"""
    assert "kvjax.models.decoder" in run_python(code, cwd=tmp_path, PYTHONPATH=str(ROOT)).split()


def forbidden_imports(path: Path, source: str) -> list[str]:
    """Imports that load a second copy of a linked folder, or that lead out of one.

    Two copies of a module mean two pytree types; and imports run one way, from kvjax to the folders it links to.
    """
    linked = path.parts[0] in LINKED
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            # a module in a folder has one level to itself: models/x.py may climb one, models/a/x.py two
            names = ["kvjax"] if linked and node.level >= len(path.parts) else []
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        else:
            continue
        top = {name.split(".")[0] for name in names}
        if top & {*LINKED, *(["kvjax"] if linked else [])}:
            found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    ("path", "source", "forbidden"),
    [
        ("kvjax/cache.py", "import models", True),
        ("tests/test_cache.py", "from models.config import DecoderConfig", True),
        ("scripts/train.py", "def f():\n    import pallas_kernels.top_tokens as t", True),
        ("models/llama.py", "from kvjax.models import config", True),
        ("models/llama.py", "from .. import policy", True),
        ("pallas_kernels/top_tokens/triton.py", "from ...cache import KVCache", True),
        ("pallas_kernels/top_tokens/triton.py", "from ..tiles import tile", False),
        ("models/llama.py", "from .config import DecoderConfig", False),
        ("models/llama.py", "import jax.numpy as jnp", False),
        ("kvjax/cache.py", "from kvjax.models import Decoder", False),
        ("kvjax/parts/score.py", "from ..policy import Policy", False),
    ],
)
def test_forbidden_imports_are_found(path: str, source: str, forbidden: bool) -> None:
    assert bool(forbidden_imports(Path(path), source)) == forbidden


def test_imports_run_one_way() -> None:
    found = [line for path in python_files() for line in forbidden_imports(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


def test_files_are_short() -> None:
    paths = python_files()
    assert {path.parts[0] for path in paths} >= {"kvjax", "tests", *LINKED}
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in paths}
    assert not {path: length for path, length in lengths.items() if length > 350}

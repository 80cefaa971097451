"""The documentation site: a strict build of a clean copy, what every page has, and what no page asks of other hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvjax
from kvjax import parts, policies
from kvjax.methods import registry
from scripts.site import api
from scripts.site.navigation import expanded

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = ("Engine", "__version__", "parts", "policies")  # kvjax.Engine is there as kvjax.engine.Engine
COPIED = ("docs", "kvjax", "models", "pallas_kernels", "scripts")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, in which every warning would have been an error."""
    pytest.importorskip("mkdocs_jupyter", reason="it needs Python 3.12")
    copy = tmp_path_factory.mktemp("checkout")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("mkdocs.yml", "README.md"):
        shutil.copy(ROOT / file, copy)
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    result = subprocess.run(build, cwd=copy, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return copy / "site"


@pytest.mark.long
def test_every_page_of_the_folder_is_built(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.parent.relative_to(site) for path in site.rglob("index.html")}
    assert {page.parent if page.name == "index" else page for page in pages} <= built
    assert "Ten lines" in (site / "index.html").read_text()
    assert "No description has been provided" not in "".join(p.read_text() for p in site.glob("notebooks/*/index.html"))
    assert {Path("methods", name) for name in policies.PRESETS.own} <= built


@pytest.mark.long
def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    """Links lead there, and nothing else. A browser would load what these elements and attributes name."""
    loading = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*stylesheet[^>]*//|data-\S*mathjax"
    )
    assert not [page for page in site.rglob("*.html") if loading.search(page.read_text())]
    assert 'data-md-component="source"' not in (site / "index.html").read_text()  # asks GitHub's API for stars


@pytest.mark.long
def test_every_public_name_is_on_a_page_of_the_api(site: Path) -> None:
    """By the headings of the built pages."""
    names: list[str] = []
    for page in (ROOT / "docs" / "api").glob("*.md"):
        names += (here := api.documented(page.read_text()))
        html = (site / "api" / page.stem / "index.html").read_text()
        assert not [name for name in here if f'id="{api.address(name)}"' not in html], page
    assert len(names) == len(set(names))
    public = [f"kvjax.{name}" for name in kvjax.__all__ if name not in ELSEWHERE]
    public += [f"kvjax.parts.{name}" for name in parts.__all__]
    assert not [name for name in public if not any(each == name or each.startswith(f"{name}.") for each in names)]


@pytest.mark.parametrize(
    ("nav", "expected"),
    [
        ([{"Home": "index.md"}, {"A": "a/"}], [{"Home": "index.md"}, {"A": ["a/index.md", "a/b.md", "a/c/d.md"]}]),
        ([{"A": ["a/c/d.md", "a/"]}], [{"A": ["a/c/d.md", "a/index.md", "a/b.md"]}]),
        ([{"B": "b/"}], [{"B": []}]),
    ],
)
def test_a_folder_stands_for_its_pages(nav: list, expected: list) -> None:
    assert expanded(nav, ["index.md", "a/b.md", "a/index.md", "a/c/d.md"]) == expected


@pytest.mark.long
def test_the_parts_of_methods_are_on_a_page(site: Path) -> None:
    html = (site / "api" / "method_parts" / "index.html").read_text()
    missing = [name for name in registry.parts() if name not in parts.__all__ and f"kvjax.parts.{name}\n" not in html]
    assert not missing

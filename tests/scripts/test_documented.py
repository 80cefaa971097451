"""Each script is reached by one command, which the README of its folder has in a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def named(folder: str) -> list[str]:
    """The files and folders that the rows of a folder's README name in their first column."""
    found = []
    for line in (ROOT / folder / "README.md").read_text().splitlines():
        if cell := re.match(r"\| `([^`]+)` \|", line):
            first, *rest = cell[1].split()
            if first == "python":
                module, _, name = rest[1].partition(".")
                assert (rest[0], module) == ("-m", folder)
                found.append(f"{name}.py")
            elif first in ("bash", "source"):
                assert rest[0].startswith(f"{folder}/")
                found.append(rest[0].removeprefix(f"{folder}/"))
            else:
                found.append(first.rstrip("/"))
    return found


@pytest.mark.parametrize("folder", ["scripts", "benchmarks", "goldens"])
def test_every_file_has_one_row(folder: str) -> None:
    left_out = {"README.md", "__init__.py", "__pycache__"}
    assert sorted(named(folder)) == sorted({path.name for path in (ROOT / folder).iterdir()} - left_out)


@pytest.mark.parametrize("folder", ["scripts", "benchmarks", "goldens"])
def test_what_is_run_is_a_program(folder: str) -> None:
    """A module with a row as a command runs when it is called, and no other does."""
    rows = re.findall(rf"\| `python -m {folder}\.(\w+)", (ROOT / folder / "README.md").read_text())
    programs = [path.stem for path in (ROOT / folder).glob("*.py") if "__main__" in path.read_text()]
    assert sorted(rows) == sorted(set(programs) - {"bench_sides"})  # started by bench_cpu


MENTION = re.compile(
    r"python -m (scripts|benchmarks|goldens)\.([a-z]\w*)|(?<![\w/])(?:scripts|benchmarks|goldens)/[a-z]\w*\.(?:py|sh)\b"
)


def test_documents_name_scripts_that_exist() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("configs/**/*.yaml")]
    gone = {"scripts/train_duo_gates.py"}  # the changelog says so
    found = {
        f"{match[1]}/{match[2]}.py" if match[1] else match[0]
        for page in pages
        for match in MENTION.finditer(page.read_text())
    }
    assert len(found) > 30
    assert not {name for name in found - gone if not (ROOT / name).exists()}

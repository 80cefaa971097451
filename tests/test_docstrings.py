"""First lines of docstrings: a sentence with a verb, or a noun; never a clause that hangs in the air."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HANGING = {"What", "Whether", "How", "Where", "When", "Which", "Of", "Those", "That", "Whose", "Whoever", "With", "As"}
FOLDERS = ("kvjax", "models", "pallas_kernels", "scripts", "benchmarks", "goldens")


def first_words(path: Path) -> Iterator[tuple[str, str]]:
    """The place and the first word of every docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}", text.split()[0].strip(",:;")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_begins_with_a_clause(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    words = [found for path in paths for found in first_words(path)]
    assert len(words) > 0
    assert [place for place, word in words if word in HANGING] == []

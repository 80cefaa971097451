"""The notebooks of the documentation run without errors, and print what they show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

run_notebooks = pytest.importorskip("scripts.run_notebooks", reason="needs nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOKS = run_notebooks.NOTEBOOKS
LARGEST = 300_000  # bytes
BADGE = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/kvjax/kvjax/blob/main/docs/notebooks/{name})"
)


NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def same(text: str, other: str) -> bool:
    """Compares two texts. Of numbers one in a hundred answers may differ, as another CPU rounds scores otherwise."""
    words = [NUMBER.sub("0", each).split() for each in (text, other)]
    numbers = [[float(found.replace(",", "")) for found in NUMBER.findall(each)] for each in (text, other)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=0.05, abs=2)


def shown(cell: Any) -> list[Any]:
    """What a cell shows: its text, and the kinds of its pictures. Of a cell that varies, the kinds alone."""
    varies = "varies" in cell.metadata.get("tags", [])
    found: list[Any] = []
    for output in cell.outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        assert "image/png" not in output.get("data", {}) or output.metadata["image/png"]["alt"]
        if varies:
            found.append(output.output_type)
        elif output.output_type == "stream":
            found.append(output.text)
        else:
            found += sorted((kind, "" if kind.startswith("image") else text) for kind, text in output.data.items())
    return found


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_show_what_they_print(path: Path) -> None:
    stored, new = nbformat.read(path, as_version=4), run_notebooks.executed(path)
    for before, after in zip(stored.cells, new.cells, strict=True):
        if before.cell_type == "code":
            assert same(str(shown(after)), str(shown(before))), (before.source, shown(after))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_open_in_colab(path: Path) -> None:
    assert path.stat().st_size < LARGEST
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert BADGE.format(name=path.name) in notebook.cells[0].source
    installs = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert re.search(r'%pip install -q "kvjax\[plot\] @ git\+https://github.com/kvjax/kvjax"', installs)
    assert "execution" not in json.dumps([dict(cell.metadata) for cell in notebook.cells])
    for link in re.findall(r"\]\((\.\.?/[^)#]+|[\w/]+\.(?:md|ipynb))", "\n".join(c.source for c in notebook.cells)):
        assert (path.parent / link).exists(), link


def test_all_four_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "dialogue_and_documents",
        "on_a_gpu_or_tpu",
        "tutorial",
        "your_own_score",
    ]

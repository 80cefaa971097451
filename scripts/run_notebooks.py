"""Runs the notebooks of the documentation, each in an empty folder, and writes their outputs into them.

The metadata of a cell has the alternative text of its picture, `alt`. Output of a cell with the tag `varies` depends on
the machine or the time. All other text is the same in every run, and tests/test_notebooks.py compares it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SECONDS = 900  # per cell, on a busy machine


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run. Raises nbclient.exceptions.CellExecutionError for a cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},  # compiled as users compile
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
        "PIP_NO_INDEX": "1",
        "PYTHONWARNINGS": "ignore:IProgress not found",  # a kernel without widgets is meant
    }
    with TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute(env=environment)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.metadata["image/png"] = {"alt": cell.metadata["alt"]}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main() -> None:
    """Runs the notebooks that the arguments name, by default all."""
    for path in map(Path, sys.argv[1:]) if len(sys.argv) > 1 else NOTEBOOKS:
        print(path, flush=True)
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()

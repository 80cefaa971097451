"""What the tests against kvpress have in common; golden/README.md describes the archives."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
MODELS = ("llama_group1", "llama_group4", "llama_group7", "mistral")
PYTHON = "KVJAX_KVPRESS_PYTHON"

needs_kvpress = pytest.mark.skipif(
    PYTHON not in os.environ, reason=f"{PYTHON} names no interpreter with kvpress; see golden/README.md"
)


def check_made_again(script: str, suffix: str, expected: dict[str, np.ndarray], folder: Path) -> None:
    """Runs a script of golden archives for the model llama_group7, and compares the arrays of its archive."""
    command = [os.environ[PYTHON], "-m", f"goldens.{script}", "--folder", str(folder), "--model", "llama_group7"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    with np.load(folder / f"llama_group7{suffix}.npz") as made:
        assert set(made) == set(expected)
        for name in set(expected) - {"meta"}:
            np.testing.assert_allclose(made[name], expected[name], atol=1e-4, rtol=0, err_msg=name)

"""A checkpoint that all tests of this folder may change."""

from pathlib import Path

import pytest

from kvjax.checkpoint import save_hf
from tests.checkpoint.folders import decoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf(decoder(), tmp_path / "model")
    return tmp_path / "model"

"""The published model and the essays, fetched once for all workers; tests are skipped where that is impossible."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kvjax
from kvjax.models import Decoder

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_real_model.py"


@dataclass(frozen=True)
class Real:
    """The model, its tokenizer, its file, and the tokens of an essay."""

    params: Decoder
    tokenizer: Any
    file: Path
    essay: list[int]


@pytest.fixture(scope="session")
def real() -> Real:
    pytest.importorskip("gguf")
    result = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    if result.returncode != 0:
        pytest.skip(f"no published model: {result.stderr.strip()}")
    folder = Path(result.stdout.strip())
    file = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    params, tokenizer = kvjax.load(file)
    assert tokenizer is not None
    text = (folder / "PaulGrahamEssays" / "worked.txt").read_text()
    return Real(params, tokenizer, file, tokenizer(text, add_special_tokens=False).input_ids)

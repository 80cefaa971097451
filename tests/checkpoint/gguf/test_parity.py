"""Logits of GGUF files against transformers' own reading of the same files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvjax.checkpoint import load
from tests.checkpoint.gguf.files import CASES, write
from tests.models.plain import logits

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

# transformers reads neither InternLM2, nor the keys of yarn, windows, biases and Gemma's factors. It takes Qwen3's head
# size and Phi's padding token from its defaults.
COMPARED = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "phi3": {"vocab_size": 32_064},
}


@pytest.mark.long
@pytest.mark.parity
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("name", COMPARED)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    write(CASES[name], tmp_path / "model.gguf", "Q8_0", **COMPARED[name])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    params, _ = load(tmp_path / "model.gguf")
    tokens = np.random.default_rng(0).integers(0, 40, (2, 7))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(logits(params, tokens), expected, atol=1e-4, rtol=0)

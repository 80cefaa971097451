"""The memory that docs/performance.md states is what `kvjax info` and `kvjax plan` compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.checks import bytes_text
from tests.cli.commands import kv

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "dtype": "bfloat16",
}


@pytest.mark.slow
def test_the_table_of_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| policy | entries |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 : lines.index("", start)]]
    policies = [option for row in rows for option in ("--policy", row[0].split("`")[1])]

    def plans(command: str, *options: str) -> list[dict[str, Any]]:
        status, stdout, stderr = kv(command, tmp_path, "--json", *options, *policies)
        assert status == 0, stderr
        found: list[dict[str, Any]] = json.loads(stdout)["plans"]
        return found

    caches = plans("info", "--length", "131072", "--batch", "1", "--max-new-tokens", "1024")
    engines = plans("plan", "--memory", "80GB", "--max-prompt", "131072", "--chunk", "4096")
    for row, cache, engine in zip(rows, caches, engines, strict=True):
        assert row[1:] == [
            f"{np.mean(cache['slots']):,.0f}",
            bytes_text(cache["bytes"]),
            f"{cache['compression']:.1f}",
            bytes_text(engine["prompt"]),
            f"{engine['rows']:,}",
        ]

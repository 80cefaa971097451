"""Synthetic data files in the formats of the benchmarks."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

WORDS = re.findall(
    r"\w+", "the of and a to in is you that it he was for on are as with his they I at be this have from"
)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder: essays, squad.json, hotpotqa.json."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    said = [" ".join(rng.choices(WORDS, k=rng.randint(5, 14))).capitalize() + "." for _ in range(100)]
    (folder / "essays.txt").write_text("\n\n".join(" ".join(said[i : i + 5]) for i in range(0, 100, 5)))
    squad = [
        {
            "paragraphs": [
                {
                    "context": f"Paragraph {a} {b}. {' '.join(said[5 * a + b :][:3])}",
                    "qas": [
                        {
                            "question": f"Who is {a} {b}?",
                            "is_impossible": False,
                            "answers": [{"text": f"name{a}{b}"}, {"text": f"name{a}{b}"}, {"text": "nobody"}],
                        },
                        {"question": "Impossible?", "is_impossible": True, "answers": []},
                    ],
                }
                for b in range(3)
            ]
        }
        for a in range(15)
    ]
    (folder / "squad.json").write_text(json.dumps({"data": squad}))
    hotpotqa = [
        {
            "question": f"What is {i}?",
            "answer": f"answer{i}",
            "context": [[f"Title {i} {j}", [f"{said[i + j]} ", said[i]]] for j in range(10)],
        }
        for i in range(6)
    ]
    (folder / "hotpotqa.json").write_text(json.dumps(hotpotqa))
    return folder

"""Divides Paul Graham's essays into texts for training gates and texts for their evaluation.

    python -m scripts.gate_texts DATA runs/texts
    kvjax train-gates SMOLLM2 --method fastkvzip --data runs/texts/train --out runs/gates/fastkvzip \
        --steps 600 --length 1024 --distinct 75    # and the same with kvzap
    kvjax eval --config configs/smollm2/gates.yaml --model SMOLLM2 --data runs/texts/test --out runs/gates_results

DATA is the folder that `bash scripts/real_model.sh` names. OUT/train has every other essay as it is; the same essays
with facts between their sentences, made of words and random numbers, in other sentences than RULER's needles; and
modules of Python's standard library, in which there are tables, numbers and code. OUT/test/PaulGrahamEssays has the
other essays.
"""

from __future__ import annotations

import argparse
import importlib
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from html.entities import name2codepoint
from pathlib import Path

from scripts.fetch_real_model import ESSAYS

MODULES = (
    "calendar",
    "colorsys",
    "datetime",
    "encodings.aliases",
    "html.entities",
    "ipaddress",
    "locale",
    "pydoc_data.topics",
    "statistics",
)
LONGEST = 200_000  # characters of a module
FACTS = 0.12  # the share of sentences that a fact follows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help=f"the folder with {ESSAYS}")
    parser.add_argument("out", type=Path, help="the folder to write")
    given = parser.parse_args()
    essays = sorted((given.data / ESSAYS).glob("*.txt"))
    if not essays:
        parser.error(f"{given.data / ESSAYS} has no essays: expected the folder that scripts/real_model.sh names")
    test = given.out / "test" / ESSAYS
    test.mkdir(parents=True, exist_ok=True)
    for essay in essays[1::2]:
        shutil.copy(essay, test)
    write_training({path.name: path.read_text() for path in essays[::2]}, given.out / "train")


def write_training(essays: Mapping[str, str], folder: Path) -> None:
    """Writes the essays as they are, the essays with facts, and the modules."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in essays.items():
        (folder / name).write_text(text)
    for name, text in with_facts(essays).items():
        (folder / f"facts_{name}").write_text(text)
    for name in MODULES:
        source = Path(importlib.import_module(name).__file__ or "").read_text()
        (folder / f"python_{name}.txt").write_text(source[:LONGEST])


def with_facts(texts: Mapping[str, str]) -> dict[str, str]:
    """Texts with facts behind some of their sentences."""
    rng = random.Random(0)
    words = sorted({word for text in texts.values() for word in re.findall(r"\b[a-z]{5,12}\b", text)})

    def behind(space: re.Match[str]) -> str:
        return f"{space[0]}{fact(rng, words)} " if rng.random() < FACTS else space[0]

    return {name: re.sub(r"(?<=[.!?])\s+", behind, text) for name, text in texts.items()}


def fact(rng: random.Random, words: Sequence[str]) -> str:
    """A sentence about words, names and numbers of up to eight digits."""
    name, year = rng.choice(sorted(name2codepoint)), rng.randrange(1900, 2025)
    first, second, third = (rng.choice(words) for _ in range(3))
    number, other = (rng.randrange(10 ** rng.randint(2, 8)) for _ in range(2))
    return rng.choice(
        (
            f"The HTML name {name} stands for code point {name2codepoint[name]}.",
            f"Order {number} was sent to the {first} store.",
            f"The telephone number of the {first} office is {number}.",
            f"In {year}, {number} copies of {first} {second} were sold.",
            f"The password for {first}: {third}-{number}.",
            f"{first.capitalize()} costs {number} dollars, {second} {other}.",
        )
    )


if __name__ == "__main__":
    main()

"""Makes the texts on which the step `gates` of scripts/leaderboard.sh trains.

    python -m scripts.board_texts MODEL DATA OUT

MODEL is what `kvjax.load` takes, DATA a folder with RULER's files. OUT/prompts has prompts of RULER's tasks in the
model's chat template, shorter than the board's, and of another seed. The questions of qa_1 do not depend on the seed:
the prompts are behind those that a board asks. OUT/texts has what scripts/gate_texts.py makes of the second half of the
essays; the board's prompts are of the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import kvjax
from kvjax.evaluation.tasks.registry import find
from kvjax.evaluation.tasks.task import Example, Source
from scripts.gate_texts import write_training

TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multivalue",
    "niah_multiquery",
    "qa_1",
)
LENGTH = 640  # tokens of a prompt
COUNT = 30  # prompts of a task
BOARD = 500  # the most prompts of a task that a board asks
SEED = 7  # the board's is 0
PIECES = 12  # texts of the essays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what kvjax.load takes")
    parser.add_argument("data", type=Path, help="a folder with RULER's files")
    parser.add_argument("out", type=Path, help="the folder to write")
    given = parser.parse_args()
    write_training(essays(given.data), given.out / "texts")
    _, tokenizer = kvjax.load(given.model)
    folder = given.out / "prompts"
    folder.mkdir(parents=True, exist_ok=True)
    for i, prompt in enumerate(prompts(tokenizer, given.data)):
        (folder / f"{i:03}.txt").write_text(prompt)


def essays(data: Path) -> dict[str, str]:
    """The second half of the essays, in pieces."""
    text = json.loads((data / "PaulGrahamEssays.json").read_bytes())["text"]
    half, size = len(text) // 2, len(text) // 2 // PIECES
    return {f"essays_{i:02}.txt": text[half + i * size : half + (i + 1) * size] for i in range(PIECES)}


def prompts(tokenizer: Any, data: Path) -> Iterator[str]:
    """Prompts up to the beginning of their answers."""
    for task in find([f"ruler/{name}" for name in TASKS]):
        source = Source(
            tokenizer=tokenizer, length=LENGTH + task.new_tokens, seed=SEED, count=BOARD + COUNT, folder=data
        )
        for example in islice(task.examples(source), BOARD, None):
            if isinstance(example, Example):
                (question,) = example.questions
                asked = {"role": "user", "content": example.context + question.text.removesuffix(question.opening)}
                begun = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
                yield begun + question.opening


if __name__ == "__main__":
    main()

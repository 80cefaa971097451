"""Prints texts of the demo model's tasks, each with a question and its answer, one text per line.

    python -m scripts.demo_texts --count 400 > texts.txt
    kvjax measure-statistics kvjax/demo_model --data texts.txt --out statistics --batches 64 --batch 4
    python -m scripts.demo_texts --count 400 --prompts prompts
    kvjax train-gates kvjax/demo_model --method lookaheadkv --data prompts --out gates --length 256

With --prompts, each text without its answer is a file of that folder.

No text is one of the evaluation, whose texts have other seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from kvjax.evaluation.tasks.demo import TASKS, example
from kvjax.evaluation.tasks.vocabulary import STOP, decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400, help="the number of texts")
    parser.add_argument("--length", type=int, default=1024, help="the number of tokens of a text and its question")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=Path, help="a folder for files of prompts; nothing is printed then")
    arguments = parser.parse_args()
    if arguments.prompts is not None:
        arguments.prompts.mkdir(parents=True, exist_ok=True)
    for i in range(arguments.count):
        drawn = example(list(TASKS)[i % len(TASKS)], arguments.length, np.random.default_rng([arguments.seed, i]))
        if arguments.prompts is None:
            print(decode(drawn.prompt), decode(drawn.answer), STOP)
        else:
            (arguments.prompts / f"{i:05}.txt").write_text(decode(drawn.prompt))


if __name__ == "__main__":
    main()

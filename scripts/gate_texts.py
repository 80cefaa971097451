"""Divides Paul Graham's essays into texts for training gates and texts for their evaluation.

    python scripts/gate_texts.py DATA runs/texts
    kvjax train-gates SMOLLM2 --method fastkvzip --data runs/texts/train --out runs/gates/fastkvzip \
        --steps 600 --length 1024 --distinct 100
    kvjax eval --config configs/smollm2/gates.yaml --model SMOLLM2 --data runs/texts/test --out runs/gates_results

DATA is the folder that `bash scripts/real_model.sh` names. OUT/train has every other essay and four modules of Python's
standard library, in which there are numbers and code; OUT/test/PaulGrahamEssays has the other essays.
"""

from __future__ import annotations

import argparse
import calendar
import datetime
import ipaddress
import shutil
import statistics
from pathlib import Path

from fetch_real_model import ESSAYS

MODULES = (calendar, datetime, ipaddress, statistics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help=f"the folder with {ESSAYS}")
    parser.add_argument("out", type=Path, help="the folder to write")
    given = parser.parse_args()
    essays = sorted((given.data / ESSAYS).glob("*.txt"))
    if not essays:
        parser.error(f"{given.data / ESSAYS} has no essays: expected the folder that scripts/real_model.sh names")
    train, test = given.out / "train", given.out / "test" / ESSAYS
    for folder, texts in ((train, essays[::2]), (test, essays[1::2])):
        folder.mkdir(parents=True, exist_ok=True)
        for text in texts:
            shutil.copy(text, folder)
    for module in MODULES:
        assert module.__file__ is not None
        shutil.copy(module.__file__, train / f"python_{module.__name__}.txt")


if __name__ == "__main__":
    main()

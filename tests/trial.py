"""Tries kvjax as a careless and a hostile user would, and counts what happens.

    python -m tests.trial

The calls are those of the tests: odd arguments of presets, parts and public functions, odd values of the options of all
commands, damaged run folders and damaged saved caches. Another outcome than the first two of the table is a defect, and
is printed on stderr. The last column has the CPU time of the slowest refusal.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from kvjax import policies
from tests.cli import test_odd_options
from tests.cli.conftest import saved
from tests.evaluation import test_damaged_runs
from tests.evaluation.test_report import write
from tests.files import test_damage
from tests.request import test_odd_arguments
from tests.request.test_odd_arguments import FUNCTIONS, PARTS, TEXTS, Call, refused, without_programs
from tests.tiny import decoder

DAMAGES = 400


def outcome(call: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    try:
        return "accepted" if refused(call, arguments) is None else "refused"
    except BaseException as error:
        return f"{call} {arguments}: {error!r}"


def python(calls: Iterable[Call]) -> Generator[str, None, None]:
    for call in calls:
        yield outcome(*call)


def functions(folder: Path) -> Generator[str, None, None]:
    for name in FUNCTIONS:
        calls = list(test_odd_arguments.calls_of_function(name, folder))
        with without_programs(folder):
            yield from python(calls)


def commands(folder: Path) -> Generator[str, None, None]:
    (folder / "model").mkdir()
    model = saved(folder / "model", layers=1)
    with without_programs(folder):
        for command in test_odd_options.COMMANDS.commands:
            for arguments in test_odd_options.calls(command, model):
                yield test_odd_options.outcome([command, *arguments])


def runs(folder: Path) -> Generator[str, None, None]:
    rng, run = np.random.default_rng(0), write(folder / "run")
    for _ in range(DAMAGES):
        copy = shutil.copytree(run, folder / "copy")
        test_damaged_runs.damage(copy, rng)
        yield outcome(reported, {"run": copy})
        shutil.rmtree(copy)


def reported(run: Path) -> None:
    """Reports on a run. Raises ValueError with the message of a documented error."""
    if (message := test_damaged_runs.reported(run, None)) is not None:
        raise ValueError(message)


def caches(folder: Path) -> Generator[str, None, None]:
    rng, params = np.random.default_rng(0), decoder()
    kvjax.save_cache(
        folder / "cache", kvjax.prefill(params, [[1, 2, 3, 4], [4, 2]], policy="kvcompose:budget=3"), params
    )
    for _ in range(DAMAGES):
        copy = shutil.copytree(folder / "cache", folder / "copy")
        test_damage.damage(copy, rng)
        found = outcome(kvjax.restore_cache, {"path": copy, "params": params})
        yield "damage was not noticed" if found == "accepted" else found
        shutil.rmtree(copy)


def kinds(within: Path) -> dict[str, Generator[str, None, None]]:
    """The outcomes of each kind of calls, which have folders in that one."""

    def folder(name: str) -> Path:
        (within / name).mkdir()
        return within / name

    return {
        "presets": (
            outcome for name in policies.PRESETS for outcome in python(test_odd_arguments.calls_of_preset(name))
        ),
        "parts": (outcome for name in PARTS for outcome in python(test_odd_arguments.calls_of_part(name))),
        "texts": (outcome for text in TEXTS for outcome in python(test_odd_arguments.calls_of_text(text))),
        "public functions": functions(folder("functions")),
        "options of commands": commands(folder("commands")),
        "damaged run folders": runs(folder("runs")),
        "damaged saved caches": caches(folder("caches")),
    }


def main() -> int:
    defects = 0
    print("| kind | calls | refused by a documented error | accepted | defects | slowest refusal, s |")
    print("|---|---:|---:|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        for kind, outcomes in kinds(Path(temporary)).items():
            found: Counter[str] = Counter()
            slowest, before = 0.0, time.process_time()
            for outcome in outcomes:
                now = time.process_time()
                found[outcome] += 1
                slowest, before = max(slowest, now - before if outcome == "refused" else 0.0), now
            refusals, accepted = found.pop("refused", 0), found.pop("accepted", 0)
            bad = found.total()
            print(
                f"| {kind} | {refusals + accepted + bad} | {refusals} | {accepted} | {bad} | {slowest:.2f} |",
                flush=True,
            )
            for outcome in found:
                print(f"{kind}: {outcome[:500]}", file=sys.stderr)
            defects += bad
    return int(defects > 0)


if __name__ == "__main__":
    sys.exit(main())

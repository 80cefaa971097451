"""Measures what share of small faults in the code the tests find.

    pip install ".[dev,parity,mutants]"
    python -m scripts.mutants --count 64 > mutants.jsonl

cosmic-ray lists the mutations of the files below `kvjax/methods`, `cache`, `attend`, `policy` and `reading`. Each drawn
mutant changes one place, such as `<` to `<=`, `and` to `or` or 1 to 2, in a copy of the checkout, where the tests of
the file run until one fails. Annotations, text and hints are not mutated. The tests of a file are those of its own name
and those that name what it defines most often; where no test has its name, the invariants of all policies as well; of a
method also those of all refusals, options and defaults. With --whole, a mutant that these do not find meets all other
tests of the default run, which takes minutes. The output is a JSON line for each mutant: its place, its line before and
after, and the test that found it, or null if it survived.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import SimpleQueue

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("methods", "cache", "attend", "policy", "reading")
INVARIANTS = "tests/policy/test_invariants.py"
OF_ALL_METHODS = [
    "tests/methods/test_refusals.py",
    *(f"tests/policy/test_{name}.py" for name in ("defaults", "options", "ranges")),
]
CORE = (*PACKAGES, "common", "tests")  # folders of tests
FILES = 3  # of tests that run for a mutant
OWN = 1000  # mentions that a test file of a file's own name counts as
LIMIT = 900  # seconds; a mutant whose tests take longer counts as found
LIMIT_OF_ALL = 3600
HINTS = "strict", "indices_are_sorted", "unique_indices"  # arguments of zip and of XLA's scatters
SKIPPED = "core/RemoveDecorator", "core/ExceptionReplacer"  # a dataclass without its decorator fails on import


@dataclass(frozen=True)
class Mutant:
    """The `occurrence`-th place of a file, relative to the checkout, that a cosmic-ray operator can change."""

    path: str
    line: int
    operator: str
    occurrence: int


def ignored(code: str) -> set[tuple[int, int]]:
    """The (line, column) of all tokens in annotations, text and hints, which change no result."""
    spans = []
    for node in ast.walk(ast.parse(code)):
        hints = [node.value] if isinstance(node, ast.keyword) and node.arg in HINTS else []
        texts = [node] if isinstance(node, ast.Constant | ast.JoinedStr) and not _number(node) else []
        spans += [getattr(node, "annotation", None), getattr(node, "returns", None), *texts, *hints]
    places = set()
    lines = code.split("\n")
    for span in filter(None, spans):
        for line in range(span.lineno, span.end_lineno + 1):
            first = span.col_offset if line == span.lineno else 0
            last = span.end_col_offset if line == span.end_lineno else len(lines[line - 1])
            places |= {(line, column) for column in range(first, last)}
    return places


def _number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float)


def mutants(path: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    code = (ROOT / path).read_text()
    tree, skipped = get_ast(code), ignored(code)
    for name in operator_names():
        operator = get_operator(name)
        if name in SKIPPED or operator.arguments():
            continue
        places = (place for node in ast_nodes(tree) for place in operator().mutation_positions(node))
        for occurrence, (start, _) in enumerate(places):
            if start not in skipped:
                yield Mutant(path, start[0], name, occurrence)


def draw(count: int, seed: int) -> list[Mutant]:
    """A sample: a line of code at random, and one of its mutants at random."""
    files = sorted(str(x.relative_to(ROOT)) for name in PACKAGES for x in (ROOT / "kvjax" / name).rglob("*.py"))
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in (mutant for path in files for mutant in mutants(path)):
        by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    drawn = random.Random(seed)
    lines = drawn.sample(sorted(by_line), len(by_line))
    return list(islice(filter(parses, (drawn.choice(by_line[line]) for line in lines)), count))


def parses(mutant: Mutant) -> bool:
    """Returns whether a mutant is code; an operator in place of the star of a signature is none."""
    try:
        ast.parse(mutated(mutant, (ROOT / mutant.path).read_text()))
    except SyntaxError:
        return False
    return True


def mutated(mutant: Mutant, code: str) -> str:
    """The code of a file with a mutant."""
    result = mutate_code(code, get_operator(mutant.operator)(), mutant.occurrence)
    assert result is not None, mutant
    return result


def tests_of(path: str) -> list[str]:
    """The tests of a file's own name and those that name what it defines most often; the invariants, if it has none."""
    tree = ast.parse((ROOT / path).read_text())
    method, folder = path.startswith("kvjax/methods/"), Path(path).parent.name
    own = folder if path.count("/") > 2 and folder != "common" else Path(path).stem
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)} | {*[own] * method}
    public = "|".join(re.escape(name) for name in names if not name.startswith("_"))
    word = re.compile(rf"(?<![A-Za-z])(?:{public or 'a^'})(?![A-Za-z])")  # also within "compactor_c37_r75"
    always = OF_ALL_METHODS * method
    found = [x for x in (ROOT / "tests").rglob("test_*.py") if x.parent.name in CORE]
    tests = [x for x in found if str(x.relative_to(ROOT)) not in always]
    rated = {x: len(word.findall(x.read_text())) + OWN * x.stem.startswith(f"test_{own}") for x in tests}
    most = sorted((x for x in tests if rated[x]), key=lambda x: (-rated[x], x))[:FILES]
    chosen = always + [str(x.relative_to(ROOT)) for x in most]
    return chosen if most and rated[most[0]] >= OWN else [*(x for x in chosen if x != INVARIANTS), INVARIANTS]


def copy(folder: Path) -> Path:
    """Copies the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def run(mutant: Mutant, folder: Path, whole: bool) -> dict[str, object]:
    """Applies a mutant in a copy of the checkout, runs the tests of its file, or all, and puts the file back."""
    path = folder / mutant.path
    code = path.read_text()
    changed = mutated(mutant, code)
    before, after = (text.split("\n")[mutant.line - 1].strip() for text in (code, changed))
    chosen = tests_of(mutant.path)
    path.write_text(changed)
    try:
        found = failing(chosen, folder)
        if whole and found is None:
            found = failing([f"--ignore={test}" for test in chosen], folder, LIMIT_OF_ALL)
    finally:
        path.write_text(code)
    return {"path": mutant.path, "line": mutant.line, "before": before, "after": after, "found_by": found}


def failing(arguments: list[str], folder: Path, limit: int = LIMIT) -> str | None:
    """The first test that fails in a copy of the checkout; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-xq", "--no-header", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return f"no end within {limit} seconds"
    if not result.returncode:
        return None
    killer = re.search(r"^(?:FAILED|ERROR) (\S+)", result.stdout, re.MULTILINE)
    return killer[1] if killer else "pytest did not start"


def main() -> None:
    """Runs a sample of mutants on as many copies of the checkout as there are workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=64, help="mutants (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="mutants that run at the same time (%(default)s)")
    parser.add_argument("--whole", action="store_true", help="all tests of the default run for those that survive")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the mutants to run; all if absent")
    options = parser.parse_args()
    sample = draw(options.count, options.seed)
    chosen = [sample[i] for i in (range(len(sample)) if options.only is None else options.only)]
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(options.workers) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for i in range(options.workers):
            free.put(copy(Path(place) / str(i)))

        def work(mutant: Mutant) -> dict[str, object]:
            folder = free.get()
            try:
                return run(mutant, folder, options.whole)
            finally:
                free.put(folder)

        for result in pool.map(work, chosen):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

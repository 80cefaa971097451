"""What a new preset must have elsewhere: options for the tests of all presets, and its rows of documentation."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

from kvjax import policies
from tests.policy.presets import SPECS

ROOT = Path(__file__).resolve().parents[2]
METHODS = (ROOT / "docs" / "methods" / "index.md").read_text()
SECTIONS = ("What each method computes", "Budgets, state and cost")


def rows(section: str) -> set[str]:
    """The presets that have a row in a section of docs/methods/index.md."""
    text = METHODS.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)", text, re.MULTILINE))


@pytest.mark.parametrize("preset", policies.PRESETS.own)
def test_options_for_the_tests_of_all_presets(preset: str) -> None:
    assert SPECS[preset], (
        f"define OPTIONS in tests/methods/test_{preset}.py: a tuple of the options of {preset} as text, for prompts of "
        "6 to 24 tokens, such as ('budget=12,window=4',)"
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_rows_of_documentation(section: str) -> None:
    missing = policies.PRESETS.own.keys() - rows(section)
    assert not missing, f"docs/methods/index.md, {section}: add a row of a table that begins with | `{min(missing)}` |"
    unknown = rows(section) - policies.PRESETS.own.keys()
    assert not unknown, f"docs/methods/index.md, {section}: {unknown} are no presets"


def test_the_number_of_presets_in_the_readme() -> None:
    said = re.search(r"(\d+) presets are", (ROOT / "README.md").read_text())
    assert said is not None
    count = len(policies.PRESETS.own)
    assert int(said[1]) == count, f"README.md says {said[1]} presets: there are {count}"


def test_the_changelog_names_every_preset() -> None:
    named = set(re.findall(r"`(\w+)[`:(]", (ROOT / "CHANGELOG.md").read_text()))
    missing = policies.PRESETS.own.keys() - named
    assert not missing, f"CHANGELOG.md: add a line that names `{min(missing)}`"


@pytest.mark.parametrize("preset", policies.PRESETS.own)
def test_docstrings_for_the_page_of_the_preset(preset: str) -> None:
    build = policies.PRESETS.own[preset]
    title = (inspect.getdoc(sys.modules[build.__module__]) or "").splitlines()[0]
    assert re.search(r"(arXiv \d{4}\.\d{5}|https://|no paper).*: \w+", title), (
        f"the file of {preset} begins with its name, its paper or 'no paper', and a sentence: {title}"
    )
    text = (inspect.getdoc(build) or "").partition("\nArgs:")[0]
    assert preset == "full" or re.search(r"^ {4}\S", text, re.MULTILINE), f"indent the equation of {preset}"

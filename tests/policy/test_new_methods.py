"""What a new preset must have elsewhere: options for the tests of all presets, and a line in the changelog."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvjax import policies
from tests.policy.presets import SPECS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("preset", policies.PRESETS.own)
def test_options_for_the_tests_of_all_presets(preset: str) -> None:
    assert SPECS[preset], (
        f"define OPTIONS in tests/methods/test_{preset}.py: a tuple of the options of {preset} as text, for prompts of "
        "6 to 24 tokens, such as ('budget=12,window=4',)"
    )


def test_the_number_of_presets_in_the_readme() -> None:
    said = re.search(r"(\d+) presets are", (ROOT / "README.md").read_text())
    assert said is not None
    count = len(policies.PRESETS.own)
    assert int(said[1]) == count, f"README.md says {said[1]} presets: there are {count}"


def test_the_changelog_names_every_preset() -> None:
    named = set(re.findall(r"`(\w+)[`:(]", (ROOT / "CHANGELOG.md").read_text()))
    missing = policies.PRESETS.own.keys() - named
    assert not missing, f"CHANGELOG.md: add a line that names `{min(missing)}`"

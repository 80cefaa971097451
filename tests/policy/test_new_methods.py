"""What a new preset must have elsewhere: options for the tests of all presets."""

from __future__ import annotations

import pytest

from kvjax import policies
from tests.policy.presets import SPECS


@pytest.mark.parametrize("preset", policies.PRESETS.own)
def test_options_for_the_tests_of_all_presets(preset: str) -> None:
    assert SPECS[preset], (
        f"define OPTIONS in tests/methods/test_{preset}.py: a tuple of the options of {preset} as text, for prompts of "
        "6 to 24 tokens, such as ('budget=12,window=4',)"
    )

"""What a new preset must have: options for the tests of all presets, and docstrings that make its page."""

from __future__ import annotations

import inspect
import re
import sys

import pytest

from kvjax import policies
from kvjax.policy.suits import check_attached
from tests.policy.presets import SPECS, decoder


@pytest.mark.parametrize("preset", policies.PRESETS.own)
def test_options_for_the_tests_of_all_presets(preset: str) -> None:
    assert SPECS[preset], (
        f"define OPTIONS in tests/methods/test_{preset}.py: a tuple of the options of {preset} as text, for prompts of "
        "6 to 24 tokens, such as ('budget=12,window=4',)"
    )


@pytest.mark.parametrize("preset", ["lookaheadkv", "kvzap", "fastkvzip", "qfilter", "triattention"])
def test_the_decoder_of_a_preset_has_what_its_score_reads(preset: str) -> None:
    for options in SPECS[preset]:
        spec = f"{preset}:{options}"
        check_attached(policies.parse(spec), decoder(spec))


@pytest.mark.parametrize("preset", policies.PRESETS.own)
def test_docstrings_for_the_page_of_the_preset(preset: str) -> None:
    build = policies.PRESETS.own[preset]
    title = (inspect.getdoc(sys.modules[build.__module__]) or "").splitlines()[0]
    assert re.search(r"(arXiv \d{4}\.\d{5}|https://|no paper).*: \w+", title), (
        f"the file of {preset} begins with its name, its paper or 'no paper', and a sentence: {title}"
    )
    text = (inspect.getdoc(build) or "").partition("\nArgs:")[0]
    assert preset == "full" or re.search(r"^ {4}\S", text, re.MULTILINE), f"indent the equation of {preset}"

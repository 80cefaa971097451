"""The benchmark of methods knows every preset, those to come included."""

import importlib.util
from pathlib import Path

import pytest

from kvjax.policies import PRESETS, parse

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_methods.py"


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("budget", [512, 2048])
def test_every_preset_has_a_text(name: str, budget: int) -> None:
    spec = importlib.util.spec_from_file_location("bench_methods", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for text in script.texts(name, budget):
        smallest = parse(text).budget.smallest
        assert smallest in (None, budget) or name == "per_layer"

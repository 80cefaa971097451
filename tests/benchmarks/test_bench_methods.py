"""The benchmark of methods knows every preset, those to come included."""

import pytest

from benchmarks import bench_methods
from kvjax.policies import PRESETS, parse


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("budget", [512, 2048])
def test_every_preset_has_a_text(name: str, budget: int) -> None:
    for text in bench_methods.texts(name, budget):
        smallest = parse(text).budget.smallest
        assert smallest in (None, budget) or name == "per_layer"

"""The benchmark of kernels runs anywhere, and times nothing that is wrong."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import pytest

from kvjax import pallas_kernels

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_kernels.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look names up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_every_operation_has_a_case_that_is_checked(script: ModuleType) -> None:
    cases = list(script.cases(small=True))
    assert {case.name for case in cases} == set(pallas_kernels.implementations())
    for case in cases:
        assert script.check(case, case.draw(jax.random.key(0))) == 0  # here the kernels are the references


def test_what_is_not_the_references_result_ends_it(script: ModuleType) -> None:
    case = next(case for case in script.cases(small=True) if case.name == "window_scores")

    def wrong(*arrays: jax.Array) -> jax.Array:
        chosen = pallas_kernels.implementations()["window_scores"].why
        return case.call(*arrays) + (0.0 if "use" in chosen else float("nan"))

    with pytest.raises(SystemExit, match=r"window_scores .* from the reference"):
        script.check(replace(case, call=wrong), case.draw(jax.random.key(0)))

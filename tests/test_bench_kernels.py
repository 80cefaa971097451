"""The benchmark of kernels runs anywhere, and times nothing that is wrong."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import pytest

from kvjax import pallas_kernels

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench_kernels.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(SCRIPT.parent))
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
        arrays = jax.jit(case.draw)(jax.random.key(0))
        assert not any(
            script.check(case, arrays, script.reference(case, arrays)).values()
        )  # kernels are references here


def zero(results: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: 0 * x for name, x in results.items()}


def nan(results: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return results | {"context": float("nan") * results["context"]}


def swapped_heads(results: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: x[:, ::-1] for name, x in results.items()}


@pytest.mark.parametrize("fault", [zero, nan, swapped_heads])
def test_a_wrong_result_fails_the_check(script: ModuleType, fault: Callable[..., dict[str, jax.Array]]) -> None:
    case = next(case for case in script.cases(small=True) if case.name == "slot_attention")

    arrays = jax.jit(case.draw)(jax.random.key(0))
    wrong = replace(case, call=lambda *arrays: fault(case.call(*arrays)))
    with pytest.raises(ValueError, match=r"slot_attention .*: the error of \w+ is .*; allowed is"):
        script.check(wrong, arrays, script.reference(case, arrays))


def test_dropped_slots_fail_the_check(script: ModuleType) -> None:
    """One slot of 256, for every head. The log-sum-exp shows it where the context does not."""
    case = next(case for case in script.cases(small=True) if case.name == "slot_attention")

    def without(q: jax.Array, k: jax.Array, v: jax.Array, t: jax.Array, p: jax.Array) -> dict[str, jax.Array]:
        return case.call(q, k, v, t, p.at[..., 100].set(-1))

    arrays = jax.jit(case.draw)(jax.random.key(0))
    with pytest.raises(ValueError, match=r"slot_attention .*: the error of \w+ is"):
        script.check(replace(case, call=without), arrays, script.reference(case, arrays))


def test_kernels_are_timed_on_gpus_only(script: ModuleType) -> None:
    device_time = importlib.import_module("device_time")
    with pytest.raises(RuntimeError, match="timed by CUPTI on NVIDIA's GPUs; this is cpu"):
        device_time.kernels(jax.jit(lambda x: x + 1), 1)

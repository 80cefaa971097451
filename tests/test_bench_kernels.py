"""The benchmark of kernels runs anywhere, and times nothing that is wrong."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kvjax import pallas_kernels
from tests import scripts

Case = Any  # of the script


@pytest.fixture
def script() -> ModuleType:
    return scripts.script("bench_kernels")


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


@pytest.fixture
def production(script: ModuleType) -> Case:
    """Attention as it is timed on a device: peaked logits in bfloat16, for which the check allows more.

    The scale is a power of two, because the reference rounds scaled queries to bfloat16.
    """
    sizes = {"batch": 1, "heads": 2, "slots": 2048, "rows": 1, "group": 4, "head_dim": 64}
    kinds = scripts.script("kernel_cases")
    draw = partial(kinds.slots_of, **sizes, dtype=jnp.bfloat16)
    return kinds.Case("slot_attention", {}, partial(kinds.attention, scale=0.125), draw, (0, "bytes"))


@pytest.mark.parametrize("fault", [zero, nan, swapped_heads])
def test_a_wrong_context_fails_the_check_in_bfloat16(
    script: ModuleType, production: Case, fault: Callable[..., dict[str, jax.Array]]
) -> None:
    arrays = jax.jit(production.draw)(jax.random.key(0))
    expected = script.reference(production, arrays)

    def wrong(*arrays: jax.Array) -> dict[str, jax.Array]:
        results = production.call(*arrays)
        return results | {"context": fault(results)["context"]}

    script.check(production, arrays, expected)
    with pytest.raises(ValueError, match="the error of context is"):
        script.check(replace(production, call=wrong), arrays, expected)


def test_a_tile_that_is_not_read_fails_the_check_in_bfloat16(script: ModuleType, production: Case) -> None:
    arrays = jax.jit(production.draw)(jax.random.key(0))

    def without(q: jax.Array, k: jax.Array, v: jax.Array, t: jax.Array, p: jax.Array) -> dict[str, jax.Array]:
        return production.call(q, k, v, t, p.at[..., -64:].set(-1))

    with pytest.raises(ValueError, match=r"the error of \w+ is"):
        script.check(replace(production, call=without), arrays, script.reference(production, arrays))


@pytest.mark.slow
def test_the_mosaic_gpu_kernel_passes_the_check(script: ModuleType, production: Case) -> None:
    draw = partial(production.draw, slots=512)
    case = replace(production, draw=draw, choice="mosaic_gpu-interpret")
    arrays = jax.jit(draw)(jax.random.key(0))
    errors = script.check(case, arrays, script.reference(case, arrays))
    assert 0 < errors["context"] < 1e-2  # it is not the reference that runs
    assert errors["lse"] < 2e-3


def test_a_chosen_kernel_that_refuses_is_not_timed_as_itself(
    script: ModuleType, production: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = jax.jit(production.draw)(jax.random.key(0))
    assert script.served_by(production, arrays) == "reference"
    found = {"slot_attention": pallas_kernels.Implementation("mosaic_gpu", "")}
    monkeypatch.setattr(pallas_kernels, "implementations", lambda: found)
    assert script.served_by(replace(production, choice="mosaic_gpu"), arrays) is None


def test_dropped_slots_fail_the_check(script: ModuleType) -> None:
    """One slot of 256, for every head. The log-sum-exp shows it where the context does not."""
    case = next(case for case in script.cases(small=True) if case.name == "slot_attention")

    def without(q: jax.Array, k: jax.Array, v: jax.Array, t: jax.Array, p: jax.Array) -> dict[str, jax.Array]:
        return case.call(q, k, v, t, p.at[..., 100].set(-1))

    arrays = jax.jit(case.draw)(jax.random.key(0))
    with pytest.raises(ValueError, match=r"slot_attention .*: the error of \w+ is"):
        script.check(replace(case, call=without), arrays, script.reference(case, arrays))


def test_kernels_are_timed_on_gpus_only() -> None:
    device_time = scripts.script("device_time")
    with pytest.raises(RuntimeError, match="timed by CUPTI on NVIDIA's GPUs; this is cpu"):
        device_time.kernels(jax.jit(lambda x: x + 1), 1)

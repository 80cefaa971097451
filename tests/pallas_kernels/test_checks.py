"""The checks of kernels find what is wrong: zeros, slots that are not read, heads in another order."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from tests.pallas_kernels.cases import Case
from tests.pallas_kernels.checks import check_segments, check_slots, jitted, reference_of

CASES = [Case(128, 4, 1, 300, "bfloat16"), Case(16, 4, 1, 3000)]
SEGMENTS = Case(128, 4, 3, 0, "bfloat16", window=60)


def zeros(kernel: Any, *arrays: Any, **options: Any) -> Any:
    out, *others = kernel(*arrays, **options)
    return jnp.zeros_like(out), *others


def swapped_heads(kernel: Any, *arrays: Any, **options: Any) -> Any:
    out, *others = kernel(*arrays, **options)
    return out[:, ::-1], *others


def one_slot_less(kernel: Any, q: Any, k: Any, v: Any, t: Any, p: Any, *others: Any, **options: Any) -> Any:
    newest = jnp.unravel_index(jnp.argmax(p[0]), p[0].shape)  # a slot that a query sees, also with a window
    return kernel(q, k, v, t, p.at[0, *newest].set(-1), *others, **options)


FAULTS = (zeros, swapped_heads, one_slot_less)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_slots(case: Case, fault: Any) -> None:
    reference = reference_of("slot_attention")
    with pytest.raises(AssertionError, match="off by"):
        check_slots(jitted(lambda *arrays, **options: fault(reference, *arrays, **options)), case)


@pytest.mark.parametrize("fault", FAULTS)
def test_segments(fault: Any) -> None:
    reference = reference_of("segment_attention")
    with pytest.raises(AssertionError, match="off by"):
        check_segments(jitted(lambda *arrays, **options: fault(reference, *arrays, **options)), SEGMENTS, 2)

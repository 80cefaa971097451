"""KeyDiff in codes is the composition of its two parts, and its entries take the bytes that its docstring says."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import kvjax
from kvjax.policies import keydiff_codes, parse
from tests.methods import saved_statistics
from tests.methods.literal_codes import rounded
from tests.tiny import decoder

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = ("budget=12,recent=3", "budget=0.5,recent=2,bits=4")


@pytest.mark.parametrize("bits", [8, 4])
def test_it_is_a_composition(bits: int) -> None:
    assert keydiff_codes(240, recent=8, bits=bits) == parse(
        f"quantize:policy=keydiff,policy.budget=240,policy.recent=8,policy.every=1,bits={bits}"
    )


def test_240_entries_take_the_bytes_of_128_in_bfloat16() -> None:
    config = replace(decoder(4, 2, (None,)).config, head_dim=64)

    def bytes_of(policy: str) -> int:
        cache = kvjax.plan_cache(config, parse(policy), batch=1, length=512, new_tokens=512, dtype="bfloat16")
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.entries.stored))

    whole, codes = bytes_of("keydiff:budget=128,every=1"), bytes_of("keydiff_codes:budget=240")
    assert 0.98 * whole < codes <= whole


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("bits", [8, 4])
def test_it_retains_what_keydiff_retains_of_the_codes(bits: int) -> None:
    """The newest entries, and those whose rounded keys are least like the mean of all unit keys, at every step."""

    def score(h: int, keys: np.ndarray, values: np.ndarray, positions: np.ndarray, now: int) -> np.ndarray:
        held = rounded(keys, bits, keys.shape[1]).astype(np.float64)
        unit = held / np.linalg.norm(held, axis=1, keepdims=True)
        anchor = unit.mean(axis=0)
        return -unit @ anchor / np.linalg.norm(anchor)

    params, _ = saved_statistics.decoder(2, {})
    policy = f"keydiff_codes:budget=12,recent=3,bits={bits}"
    saved_statistics.assert_follows(params, policy, score, budget=12, sinks=0, recent=3, every=1)

"""KeyDiff in codes is the composition of its two parts, and its entries take the bytes that its docstring says."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

import kvjax
from kvjax.policies import keydiff_codes, parse
from tests.tiny import VOCAB, decoder, held

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


def test_it_retains_what_keydiff_retains_of_the_codes() -> None:
    """The newest entries, and of the others those whose stored keys are least like the mean of all unit keys."""
    params, rng = decoder(4, 2, (None,)), np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, 40)
    cache = kvjax.prefill(params, [prompt], policy=keydiff_codes(12, recent=3))
    full = kvjax.prefill(params, [prompt], policy="quantize:bits=8").entries.layer(0, 0).plain()
    keys = np.asarray(full.keys[0], np.float64)
    order = np.asarray(full.positions[0])
    for head in range(2):
        own = keys[head][np.argsort(order[head])][-40:]
        unit = own / np.linalg.norm(own, axis=-1, keepdims=True)
        likeness = unit @ unit.mean(axis=0)
        expected = {37, 38, 39} | set(np.argsort(likeness[:37], kind="stable")[:9].tolist())
        assert set(held(cache, 0)[0][head]) == expected

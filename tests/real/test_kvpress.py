"""What policies retain of an essay on a published model, against kvpress. The README of tests/golden has the format."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest

import kvjax
from tests.methods.test_kvpress import GOLDEN, Golden
from tests.products import part
from tests.real.conftest import Real
from tests.real.layers import first_layers
from tests.tiny import held

pytestmark = [pytest.mark.real, pytest.mark.slow]

PRESSES = ("snapkv", "pyramidkv", "tova", "kvcompose", "adakv", "expected_attention", "keydiff", "lagkv")
OVER_LAYERS = ("pyramidkv", "kvcompose")  # their budgets need all layers; the others are compared on the first ones
LAYERS = 2


@functools.cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "smollm2.npz") as archive:
        return dict(archive)


@pytest.mark.parametrize("press", part(PRESSES, set(PRESSES) - {"kvcompose"}))  # whose replay takes a minute
def test_policy_retains_what_kvpress_does(real: Real, press: str) -> None:
    stored = arrays()
    prompt = stored["prompt"].astype(np.int32)
    assert prompt.tolist() == real.essay[: len(prompt)]
    params = real.params if press in OVER_LAYERS else first_layers(real.params, LAYERS)
    policy = Golden(params, stored, json.loads(str(stored["meta"]))).policy(press)
    cache = kvjax.prefill(params, prompt, policy=policy)
    expected = np.unpackbits(stored[press], axis=-1, count=len(prompt))[: params.config.num_layers]
    found = np.zeros_like(expected)
    for layer, heads in enumerate(held(cache, 0)):
        for head, positions in enumerate(heads):
            found[layer, head, positions] = 1
    np.testing.assert_array_equal(found, expected)

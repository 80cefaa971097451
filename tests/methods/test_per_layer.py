"""Budgets per layer: worked examples, and what each layer retains of SnapKV's scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax.parts import DenseLayers, Fixed, Fraction, PerLayer
from kvjax.policies import adakv, parse, per_layer, snapkv
from kvjax.policy import most_entries
from tests import tiny

# What the tests of all presets run (tests/policy/presets.py).
OPTIONS = (
    "base=snapkv,base.budget=12,base.window=4,base.kernel=3,shares=(1.5,0.75)",
    "base=snapkv,base.budget=0.5,base.window=3,base.kernel=3,shares=(1.3,1.0)",
    "base=h2o,base.budget=12,base.recent=3,base.every=2,shares=(1.0,1.5)",
)

PARAMS = tiny.decoder(windows=(None, None))
ROWS = [np.random.default_rng(n).integers(0, tiny.VOCAB, n) for n in (40, 17, 3)]


@pytest.mark.parametrize(
    ("budget", "shares", "length", "expected"),
    [
        (Fixed(12), (1.5, 1.0, 0.6, 0.1), 40, [18, 12, 7, 1]),
        (Fixed(12), (1.5, 1.0), 3, [18, 12]),  # slots that an answer fills
        (Fraction(1.0), (0.7, 0.29, 1.0), 100, [70, 29, 100]),  # 0.29 * 100 is below 29 in binary
        (Fraction(0.5), (0.7, 1.3), 11, [3, 6]),  # of 5
        (Fraction(0.8), (1.5, 0.5), 10, [10, 4]),  # no layer has more than the prompt
    ],
)
def test_budgets_of_layers(budget, shares, length, expected):
    part = PerLayer(budget, shares)
    lengths = np.array([length])
    assert [part.capacity(layer, lengths, len(shares)).tolist() for layer in range(len(shares))] == [
        [entries] for entries in expected
    ]
    assert [most_entries(part, layer, length, len(shares)) for layer in range(len(shares))] == expected


@given(
    hundredths=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    budget=st.one_of(st.integers(1, 10**6), st.integers(1, 100).map(lambda x: x / 100)),
    length=st.integers(1, 200_000),
)
def test_no_rounding_error(hundredths, budget, length):
    """In integers of Python. The slots of a prompt suffice for all shorter ones."""
    part = PerLayer(Fixed(budget) if isinstance(budget, int) else Fraction(budget), tuple(x / 100 for x in hundredths))
    whole = budget if isinstance(budget, int) else length * round(budget * 100) // 100
    for layer, share in enumerate(hundredths):
        entries = whole * share // 100
        entries = entries if isinstance(budget, int) else min(entries, length)
        assert int(part.capacity(layer, np.array([length]), len(hundredths))[0]) == entries
        assert most_entries(part, layer, length, len(hundredths)) == entries


@pytest.mark.slow
@pytest.mark.parametrize("budget", [16, 0.5])
def test_each_layer_retains_what_the_base_does_at_its_budget(budget):
    """Of each row its own number, also of one that is shorter than the window."""
    base, shares = snapkv(budget, window=4, kernel=3), (1.25, 0.5)
    _, mine = tiny.prefill(PARAMS, per_layer(base, shares), ROWS, 40)
    for layer, share in enumerate(shares):
        own = replace(base, budget=PerLayer(base.budget, (share,) * 2))
        _, alone = tiny.prefill(PARAMS, own, ROWS, 40)
        for row, tokens in enumerate(ROWS):
            whole = budget if isinstance(budget, int) else len(tokens) // 2
            size = min(len(tokens), max(int(whole * share), 5))  # the window and one entry
            assert tiny.held(mine, row)[layer] == tiny.held(alone, row)[layer]
            assert [len(head) for head in tiny.held(mine, row)[layer]] == [size] * 2


@pytest.mark.slow
def test_heads_of_a_layer_compete_for_its_budget():
    """AdaKV on budgets per layer, as on PyramidKV's."""
    _, cache = tiny.prefill(PARAMS, adakv(per_layer(snapkv(16, window=4, kernel=3), (1.5, 0.5))), ROWS[:1], 40)
    assert [sum(map(len, layer)) for layer in tiny.held(cache, 0)] == [48, 16]


def test_shares_of_another_model_are_refused():
    for policy in (
        per_layer(),
        adakv(per_layer()),
        replace(per_layer(), budget=DenseLayers(PerLayer(Fixed(64), (1.0, 0.7, 1.5, 1.0)), 1)),
    ):
        with pytest.raises(ValueError, match="shares of 4 layers for a model of 2: expected a share for each layer"):
            kvjax.generate(PARAMS, ROWS[0], policy=policy)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("per_layer:base=snapkv,shares=(1.5,0.5),base.budget=80", per_layer(snapkv(80), (1.5, 0.5))),
        ("per_layer:shares=( 0.5 , 1, 1.5 ),base=snapkv,base.budget=0.5", per_layer(snapkv(0.5), (0.5, 1, 1.5))),
        ("adakv:base=per_layer,base.shares=(0.5,1.5),alpha=0.5", adakv(per_layer(shares=(0.5, 1.5)), alpha=0.5)),
    ],
)
def test_shares_as_text(text, policy):
    assert parse(text) == policy
    assert parse(repr(policy)) == policy

"""PyramidKV's budgets of each layer, in worked examples and in exact fractions."""

from __future__ import annotations

from fractions import Fraction as FractionalNumber

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.parts import Everything, Fixed, Fraction, Pyramid, most_entries


def layers_of(budget, length, layers):
    """What each layer keeps of a prompt of that length, after checking that slots suffice for all shorter ones."""
    lengths = jnp.arange(1, length + 1)
    kept = [budget.capacity(layer, lengths, layers) for layer in range(layers)]
    assert [most_entries(budget, layer, length, layers) for layer in range(layers)] == [int(x.max()) for x in kept]
    return [int(x[-1]) for x in kept]


@pytest.mark.parametrize("formula", ["paper", "code"])
def test_g11_pyramidkv_budgets(formula):
    budget = Pyramid(Fixed(12), window=4, beta=20, formula=formula)
    assert layers_of(budget, 100, 4) == [16 + 4, 11 + 4, 6 + 4, 1 + 4]
    shorter = {"paper": [20, 15, 10, 5], "code": [12] * 4}[formula]
    assert layers_of(budget, 15, 4) == layers_of(budget, 3, 4) == shorter, "all layers alike as released"


def test_g11_pyramidkv_budgets_of_a_long_prompt():
    """Of 2048 + 8 tokens in 3000: the first layer keeps 2992 and the last 1088, if it is cut to the prompt at all."""
    ported = layers_of(Pyramid(Fixed(2040), window=8, formula="kvpress"), 3000, 32)
    assert (ported[0], ported[-1]) == (2992, 1088)
    assert set(layers_of(Pyramid(Fixed(2048), window=8, formula="code"), 3000, 32)) == {2048}, "3000 < 2 * 2040"
    cut = layers_of(Pyramid(Fixed(2048), window=128, beta=40, formula="code"), 3850, 32)
    step = (3722 - 118) // 31  # high is 3792 of 3722, and low 48 + 70
    assert cut == [3722 - step * layer + 128 for layer in range(32)]
    paper = layers_of(Pyramid(Fixed(2048), window=8), 3000, 32)
    assert (paper[0], paper[-1], sum(paper) - 32 * 8) == (3978 + 8, 103 + 8, 65296)
    assert max(layers_of(Pyramid(Fraction(0.75), window=8), 400, 32)) == 400, "a share is of the prompt at most"


@given(
    length=st.integers(1, 5000),
    share=st.sampled_from([0.05, 0.25, 0.5, 0.6, 1.0]),
    window=st.integers(0, 64),
    beta=st.integers(1, 30),
    layers=st.integers(2, 80),
)
def test_pyramidkv_budgets_of_kvpress(length, share, window, beta, layers):
    """In exact fractions, as it computes them in floating point."""
    total = int(FractionalNumber(share).limit_denominator(100) * length)
    low = FractionalNumber(total, beta)
    high = 2 * total - low
    if high >= length - window:
        low, high = 2 * total - FractionalNumber(length - window), FractionalNumber(length - window)
    expected = [total] * layers
    if length >= high >= low >= window:
        expected = [round(high - layer * (high - low) / (layers - 1)) for layer in range(layers)]
    budget = Pyramid(Fraction(share), window, beta, "kvpress")
    lengths = jnp.array([length])
    for layer in {0, 1, layers // 2, layers - 1}:
        assert budget.capacity(layer, lengths, layers).tolist() == [expected[layer]]


def test_a_pyramid_stands_on_equal_layers_and_one_layer_is_the_mean():
    assert layers_of(Pyramid(Fixed(12), window=4), 100, 1) == [12]
    with pytest.raises(ValueError, match=r"a budget of Everything\(\): expected"):
        Pyramid(Everything(), window=4)

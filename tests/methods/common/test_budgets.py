"""Budgets that hold what is protected, and the options and combinations of parts that are refused."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.pallas_kernels import Reduction
from kvjax.parts import DenseLayers, Everything, Fixed, Fraction, Pooling, WindowAttention, budget_of
from kvjax.policies import expected_attention, h2o, morphkv, snapkv, streaming_llm, tova
from kvjax.policy import Layout, Protect, most_entries


@given(
    share=st.sampled_from([0.1, 0.2, 0.25, 1 / 3, 0.5, 0.75, 0.999, 1.0]),
    lengths=st.lists(st.integers(0, 10**6), min_size=5, max_size=5),
)
def test_a_share_is_exact_and_within_the_slots(share, lengths):
    """Counted as fractions: 0.1 of 10 is 1, a third of 9 is 3, for prompts of a million tokens too."""
    budget = budget_of(share)
    capacity = np.asarray(budget.capacity(0, jnp.array(lengths, jnp.int32), 1))
    numerator, denominator = {0.1: (1, 10), 0.2: (1, 5), 1 / 3: (1, 3), 0.999: (999, 1000)}.get(
        share, (int(share * 4), 4)
    )
    assert capacity.tolist() == [n * numerator // denominator for n in lengths]
    for n, c in zip(lengths, capacity, strict=True):
        assert most_entries(budget, 0, n, 1) == c


def test_kinds_of_budget():
    lengths = jnp.array([5, 500])
    assert budget_of(7) == Fixed(7)
    assert budget_of(0.5) == Fraction(0.5)
    assert budget_of(1) == Fixed(1), "an integer is a number of entries, a float a share"
    assert Fixed(7).capacity(0, lengths, 1).tolist() == [7, 7]
    assert Fraction(0.0001).capacity(0, np.array([30_000]), 1).tolist() == [3], "the smallest share"
    assert Everything().capacity(0, lengths, 1) is None
    dense = DenseLayers(Fixed(7), 2)
    assert [most_entries(dense, layer, 100, 4) for layer in range(4)] == [None, None, 7, 7]
    assert [morphkv(dense_layers=2).evicts(layer, 4) for layer in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("budget", [0, -3, 1.5, 0.0, -0.5, float("nan"), True, "512", None, [4]])
@pytest.mark.parametrize("preset", [streaming_llm, h2o, tova, snapkv, morphkv])
def test_what_is_no_budget_is_refused(preset, budget):
    with pytest.raises(ValueError, match=r"budget=.*: expected "):
        preset(budget=budget)


@pytest.mark.parametrize(
    ("preset", "options", "smallest"),
    [
        (streaming_llm, {"sinks": 4}, 5),
        (streaming_llm, {"sinks": 4, "every": 3}, 7),
        (h2o, {"recent": 6}, 7),
        (h2o, {"recent": 0.5}, 2),
        (h2o, {"recent": 0.5, "every": 4}, 8),
        (h2o, {"recent": 6, "sinks": 3}, 10),
        (tova, {"every": 2}, 2),
        (tova, {"recent": 1, "every": 2}, 3),
        (snapkv, {"window": 8}, 9),
        (morphkv, {"window": 8}, 9),
        (morphkv, {"window": 8, "every": 8}, 16),
        (morphkv, {"window": 8, "dense_layers": 1}, 9),
    ],
)
def test_a_budget_holds_what_is_protected_and_what_a_step_evicts(preset, options, smallest):
    assert preset(budget=smallest, **options).minimum == smallest
    with pytest.raises(ValueError, match=f"a budget of {smallest - 1} entries: expected {smallest} or more"):
        preset(budget=smallest - 1, **options)


def test_a_share_of_a_short_prompt_is_raised_to_the_minimum():
    policy = morphkv(budget=0.5, window=8, every=2)
    assert policy.capacity(0, jnp.array([4, 20, 21, 60]), 1).tolist() == [10, 10, 10, 30]
    assert [policy.slots(0, size, 1) for size in (4, 20, 60)] == [10, 10, 30]


@pytest.mark.parametrize(
    ("preset", "options", "says"),
    [
        (morphkv, {"window": True}, "window=True"),
        (morphkv, {"every": True}, "every=True"),
        (h2o, {"recent": True}, "recent=True"),
        (streaming_llm, {"sinks": "four"}, "sinks='four'"),
    ],
)
def test_unusable_options_are_refused_by_name(preset, options, says):
    with pytest.raises(ValueError, match=f"{says}: expected "):
        preset(**options)


def test_a_window_that_is_not_protected_is_refused():
    for recent in (7, 0.5):
        with pytest.raises(ValueError, match=r"FoldedWindow.*window of 8.*Protect\(.*recent=8 or more"):
            replace(morphkv(window=8), protect=Protect(recent=recent))
    assert replace(morphkv(window=8), protect=Protect(sinks=2, recent=9)).minimum == 12


def test_pooling_and_evicting_while_decoding_are_refused_together():
    with pytest.raises(ValueError, match=r"Pooling\(.*every=1.*cannot be combined"):
        replace(snapkv(), every=1)


def test_stored_queries_and_moving_keys_are_refused_together():
    with pytest.raises(ValueError, match=r"FoldedWindow.*positions='in_cache'"):
        replace(morphkv(), positions="in_cache")


def test_expected_attention_needs_its_sinks_and_rotated_keys():
    with pytest.raises(ValueError, match=r"ExpectedAttention.*first 4 tokens.*Protect\(.*sinks=4 or more"):
        replace(expected_attention(), protect=Protect(sinks=3))
    with pytest.raises(ValueError, match=r"ExpectedAttention.*positions='in_cache'"):
        replace(expected_attention(), positions="in_cache")


def test_summed_logits_need_a_softmax_of_their_own():
    with pytest.raises(ValueError, match=r"^morphkv: normalise='full' with group='logits': expected normalise='dist"):
        morphkv(group="logits")
    with pytest.raises(ValueError, match="sum_logits=True: expected 'distant'"):
        WindowAttention(3, Reduction(), sum_logits=True)
    with pytest.raises(ValueError, match="normalise='distant' with rescale=True: expected 'full'"):
        WindowAttention(3, Reduction(), normalise="distant", rescale=True)


@pytest.mark.parametrize(
    ("kind", "size", "says"),
    [
        ("min", 3, "pooling='min': expected 'avg' or 'max'"),
        ("avg", 4, "kernel=4: expected an odd integer >= 1"),
        ("avg", True, "kernel=True: expected an odd integer >= 1"),
        ("max", 0, "kernel=0: expected an odd"),
        ("max", -1, "kernel=-1: expected an odd"),
    ],
)
def test_poolings_that_are_refused(kind, size, says):
    with pytest.raises(ValueError, match=says):
        Pooling(kind, size)


def test_dense_layers_need_a_budget_that_is_known_beforehand():
    class Allocated(Fixed):
        layout = Layout()

    with pytest.raises(ValueError, match="expected one that is known before"):
        DenseLayers(Allocated(8), first=1)

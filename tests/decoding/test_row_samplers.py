"""Samplers of rows against each row's own sampler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax.decoding.row_samplers import RowSamplers, keep_largest
from kvjax.decoding.sampling import Greedy, Sampler, SamplingMethod, keep_top_k
from tests.decoding.test_sampling import V, random_logits

PENALTIES = st.sampled_from([None, 1.0, 0.7, 1.3, 1e-50])
SAMPLERS = st.one_of(
    st.builds(Greedy, repetition_penalty=PENALTIES),
    st.builds(
        Sampler,
        temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9, 1e-50, 1e50]),
        top_k=st.sampled_from([None, 1, 5, V, 10**12]),
        top_p=st.sampled_from([None, 1e-9, 0.4, 0.9, 1 - 1e-12, 1.0]),
        min_p=st.sampled_from([None, 0.0, 0.01, 0.5, 1.0]),
        repetition_penalty=PENALTIES,
    ),
)
draw = jax.jit(lambda samplers, *given: samplers(*given))


@pytest.mark.long
@settings(max_examples=40)
@given(samplers=st.lists(SAMPLERS, min_size=4, max_size=4), seed=st.integers(0, 2**31))
def test_each_row_draws_as_with_its_own_sampler(samplers: list[SamplingMethod], seed: int) -> None:
    logits, seen = jnp.asarray(random_logits(4, seed)), np.random.default_rng(seed).random((4, V)) < 0.2
    keys = jax.random.split(jax.random.key(seed), 4)
    together = draw(RowSamplers.of(samplers), logits, keys, seen)
    alone = [sampler(logits[i : i + 1], keys[i : i + 1], seen[i : i + 1]) for i, sampler in enumerate(samplers)]
    assert together.tolist() == [int(token[0]) for token in alone]


def test_the_largest_logits_of_each_row_are_kept() -> None:
    logits = jnp.asarray([[0.0, -0.0, -1.0, -jnp.inf, -2.0, -1.0]] * 6)
    ks = [1, 2, 3, 5, 6, 99]
    for row, k in zip(keep_largest(logits, jnp.asarray(ks)[:, None]), ks, strict=True):
        np.testing.assert_array_equal(row, keep_top_k(logits, k)[0])


def test_a_sampler_of_its_own_has_no_form_for_rows() -> None:
    class Last(SamplingMethod):
        def __call__(self, logits, keys=None, seen=None):
            return jnp.full(len(logits), logits.shape[1] - 1)

    with pytest.raises(ValueError, match=r"Last.*expected kvjax.Greedy or kvjax.Sampler"):
        RowSamplers.of([Greedy(), Last()])

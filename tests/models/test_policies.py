"""Every policy on a decoder that has all that a family may add to Llama: windows, kinds of RoPE, soft caps, norms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

import kvjax
from tests.models.everything import FACTS, ROWS, assert_full_within_budget, everything
from tests.tiny import full_logits


@pytest.mark.slow
def test_the_facts_matter():
    """Without any one of them the decoder computes other logits."""
    params = everything()
    expected = full_logits(params, [ROWS[1]], 20)[0]
    neutral = type(params.config).__dataclass_fields__
    for name in FACTS.keys() - {
        "post_norm",
        "qk_norm",
        "attention_sinks",
        "mixture",
        "keys_are_values",
        "layer_scalars",
        "layer_input_size",
        "value_norm",
    }:  # whose parameters would be missing, or which the comparison with transformers shows to matter
        graph, state = nnx.split(params)
        other = nnx.merge(graph, state)
        other.config = replace(params.config, **{name: neutral[name].default})
        for layer in other.layers:
            layer.residual_scale, fed = other.config.residual_scale, layer.mlp or layer.experts
            fed.activation = other.config.activation
        for norm in (x for _, x in nnx.iter_modules(other) if hasattr(x, "unit_offset")):
            norm.unit_offset = other.config.unit_offset_norms
        assert np.abs(full_logits(other, [ROWS[1]], 20)[0] - expected).max() > 1e-2, name


@pytest.mark.long(first=1)
@pytest.mark.slow(first=1)
def test_policies_on_all_facts(policy):
    assert_full_within_budget(everything(), policy)


@pytest.mark.slow
def test_a_prompt_that_is_read_once_for_two_policies():
    """The layers run one by one there, and layers of a kind share a program."""
    params, policies = everything(), ["snapkv:budget=24,window=4", "h2o:budget=24"]
    question = [np.array([5])] * len(ROWS)
    for once, text in zip(kvjax.prefill_each(params, ROWS, policies=policies), policies, strict=True):
        both = once, kvjax.prefill(params, ROWS, policy=text)
        ours, alone = (kvjax.generate(params, question, cache=x, max_new_tokens=2, log_probs=True) for x in both)
        np.testing.assert_array_equal(ours.tokens, alone.tokens)
        np.testing.assert_allclose(ours.log_probs, alone.log_probs, atol=1e-5)

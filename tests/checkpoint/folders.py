"""Tiny checkpoints, and helpers of the tests in this folder."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.checkpoint import CheckpointError
from kvjax.checkpoint.parameters import by_path
from kvjax.models import Decoder, config_from_hf

HF = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rope_theta": 5e5,
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBED, QUERY, HEAD = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"


def decoder(dtype=jnp.float32, **fields) -> Decoder:
    return Decoder(config_from_hf(HF | fields), nnx.Rngs(0), dtype)


def assert_equal(ours: Decoder, theirs: Decoder) -> None:
    assert ours.config == theirs.config
    one_tree, other_tree = by_path(ours), by_path(theirs)  # beside which decoders have a card
    assert one_tree.keys() == other_tree.keys()
    for one, other in ((one_tree[path], other_tree[path]) for path in one_tree):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def problems(read, folder: Path) -> tuple[str, ...]:
    """Returns the problems that `load` or `restore` reports for a folder."""
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    assert str(folder) in str(caught.value)
    return caught.value.problems

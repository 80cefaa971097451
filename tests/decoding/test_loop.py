"""The state of the decoding loop. tests/test_generate.py and tests/test_stream.py have what the loop decodes."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.decoding.loop import Answers
from kvjax.models import Decoder
from kvjax.policies import full
from kvjax.request.request import Sampling


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_answers_are_placed_with_the_rows_of_a_mesh(tiny: Decoder, impl: str) -> None:
    """Keys stay keys of their own generator."""
    mesh = kvjax.make_mesh(data=2, devices=jax.devices()[:2])
    cache = kvjax.KVCache.empty(tiny.config, full(), np.array([3, 4]), 16, np.float32, mesh)
    keys = jax.random.split(jax.random.key(7, impl=impl), 2)
    sampling = Sampling(kvjax.Greedy(), np.full((2, 1), -1, np.int32), keys, seen=None)
    placed = Answers.begin(sampling, size=8, log_probs=True, put=cache.put_rows)
    assert jax.random.key_impl(placed.sampling.keys) == jax.random.key_impl(keys)
    np.testing.assert_array_equal(jax.random.key_data(placed.sampling.keys), jax.random.key_data(keys))
    for array in jax.tree.leaves(placed):
        assert [shard.data.shape[0] for shard in array.addressable_shards] == [1, 1]

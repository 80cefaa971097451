"""A hybrid model on a mesh: its states follow the rows, and each device of `model` computes them."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.plan import bytes_per_device
from tests.attend.meshes import ROWS, mesh
from tests.tiny import hybrid

NEW = 4
MORE = [[3], [1, 2, 3], [4], [5], [6, 7], [8], [9], [1]]
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@pytest.mark.long
@pytest.mark.parametrize(("data", "model"), [(2, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_two_turns_on_a_mesh(data, model):
    params = kvjax.shard(hybrid(), mesh(data, model))
    options = {"max_new_tokens": NEW, "log_probs": True}
    ours, theirs = (kvjax.generate(x, ROWS, policy="h2o:budget=16", **options) for x in (params, hybrid()))
    for _ in range(2):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-4)
        held = sum(
            x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((ours.cache.entries, ours.cache.recurrent))
        )
        assert bytes_per_device(theirs.cache, hybrid().config, data=data, model=model) == held
        ours, theirs = (
            kvjax.generate(x, MORE, cache=answer.cache, **options) for x, answer in ((params, ours), (hybrid(), theirs))
        )

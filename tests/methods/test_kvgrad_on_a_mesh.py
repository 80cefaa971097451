"""Scores that are gradients, on a mesh: layers are differentiated across devices."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.mesh.sharding import mesh_of
from kvjax.models import Decoder, Mixture
from kvjax.parts import Attribution
from kvjax.policies import kvgrad
from kvjax.reading.replays import encoded_texts, replayed
from tests.attend.meshes import ROWS, mesh
from tests.tiny import decoder, left_pad

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

SCORE = Attribution(2, 24, instruction=(3, 1), starting=(5,), suffix=(2,))
EXPERTS: dict[str, Any] = {"mixture": Mixture(experts=8, per_token=3, size=20, biased=True, limit=1.0)}
FACTS: dict[str, Any] = {
    "experts and sinks": EXPERTS | {"attention_sinks": True},
    "window, cap and norms": {"windows": (16, None), "attention_softcap": 0.5, "post_norm": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "data", "model", "kv_heads"),
    [
        ("experts and sinks", 1, 8, 2),  # four devices share a kv head
        ("window, cap and norms", 2, 4, 4),
        pytest.param("experts and sinks", 2, 4, 8, marks=pytest.mark.exhaustive),
        pytest.param("window, cap and norms", 2, 4, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_scores_are_those_of_one_device(facts: str, data: int, model: int, kv_heads: int) -> None:
    config = replace(decoder(8, kv_heads, (None, None)).config, **FACTS[facts])
    params, policy = Decoder(config, nnx.Rngs(0)), kvgrad(12, 2, groups=kv_heads, score=SCORE)
    sharded = kvjax.shard(params, mesh(data, model))
    for ours, expected in zip(scores(sharded, policy), scores(params, policy), strict=True):
        assert expected.max() > 0
        np.testing.assert_allclose(ours, expected, atol=1e-5 * expected.max(), rtol=0)


def scores(params: Decoder, policy: kvjax.Policy) -> list[np.ndarray]:
    """The scores of each layer, before anything is evicted."""
    cache = kvjax.prefill(params, ROWS, policy=policy, compress="never")
    assert (cache.mesh is None) == (mesh_of(params) is None)
    rows = [np.asarray(row) for row in ROWS]
    tokens, lengths = map(cache.put_rows, left_pad(rows, max(map(len, rows))))
    cache = replayed(params, cache, tokens, lengths, encoded_texts(cache.policy, None))
    return [np.asarray(entries.per_slot) for entries in cache.entries]

"""What a device of a mesh is handed of a layer: the rows, heads and weights that are its own. Nothing is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kvjax.attend import over_heads, over_layers
from kvjax.mesh.heads import ALL_HEADS, Heads
from kvjax.models import AttentionLayer, Rope
from tests.attend.meshes import mesh

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")

GATES: Any = {"own": jnp.zeros(9)}
B, HEADS, KV_HEADS, N, D, E = 4, 8, 4, 3, 5, 6
QUERY, KEY = jnp.zeros((B, HEADS, N, D)), jnp.zeros((B, KV_HEADS, N, D))
LAYER = AttentionLayer(
    0,
    Rope(1e4),
    None,
    1.0,
    output=jnp.zeros((HEADS, D, E)),
    sinks=jnp.zeros(HEADS),
    statistics={"query_mean": jnp.zeros((KV_HEADS, 7))},
    hidden=jnp.zeros((B, N, E)),
    residual=jnp.zeros((B, N, E)),
    gates=GATES,
)


def shapes_of(layer: AttentionLayer, *others: Any) -> Any:
    return jax.tree.map(jnp.shape, (layer.weights, layer.hidden, layer.residual, layer.gates, others))


@pytest.mark.parametrize("hidden", [False, True])
def test_of_the_attention_of_a_layer(hidden: bool) -> None:
    """Gates, and the hidden states of a device's rows, are there if the score reads them."""
    seen: list[Any] = []

    def make(lengths: Any, heads: Heads = ALL_HEADS) -> Any:
        def attend(layer: AttentionLayer, *arrays: Any) -> tuple[Any, Any]:
            seen.append((heads, shapes_of(layer, lengths, *arrays)))
            return arrays[0], arrays[-1]

        return attend

    for devices in (None, mesh(2, 4), mesh(4, 1)):
        attend = over_heads(devices, make, hidden=hidden, lengths=jnp.zeros(B))
        found = jax.eval_shape(lambda q, k, attend=attend: attend(LAYER, q, k, k, k), QUERY, KEY)
        assert jax.tree.map(jnp.shape, found) == (QUERY.shape, KEY.shape)
    given = [(LAYER.weights, LAYER.hidden, LAYER.residual, LAYER.gates, (jnp.zeros(B), QUERY, KEY, KEY, KEY))]
    expected = [(ALL_HEADS, jax.tree.map(jnp.shape, given[0]))]
    for data, model in ((2, 4), (4, 1)):
        rows, heads, kv_heads = B // data, HEADS // model, KV_HEADS // model
        weights = {"output": (heads, D, E), "sinks": (heads,), "statistics": {"query_mean": (kv_heads, 7)}}
        states, gates = ((rows, N, E), {"own": (9,)}) if hidden else (None, None)
        key = (rows, kv_heads, N, D)
        arrays = ((rows,), (rows, heads, N, D), key, key, key)
        own = Heads("model" if model > 1 else None)
        expected.append((own, (weights, states, states, gates, arrays)))
    assert seen == expected


def test_of_a_change_of_all_layers() -> None:
    seen: list[Any] = []

    def change(records: Any, layers: Any, *, lengths: Any, heads: Heads) -> Any:
        seen.append((heads, [shapes_of(own)[0] for own in records], jax.tree.map(jnp.shape, (layers, lengths))))
        return layers

    for devices in (None, mesh(2, 4)):
        found = jax.eval_shape(
            lambda key, devices=devices: over_layers(devices, change, [LAYER] * 2, key, lengths=jnp.zeros(B)), KEY
        )
        assert found.shape == KEY.shape
    weights = {"output": (2, D, E), "sinks": (2,), "statistics": {"query_mean": (1, 7)}}
    assert seen == [
        (ALL_HEADS, [jax.tree.map(jnp.shape, LAYER.weights)] * 2, (KEY.shape, (B,))),
        (Heads("model"), [weights] * 2, ((2, 1, N, D), (2,))),
    ]

"""A layer with adapters has other matrices where there are adapters, and the same ones elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.gates.adapters import adapted
from tests.tiny import decoder


def test_the_last_map_alone_has_adapters() -> None:
    layer = decoder().layers[0]
    inputs, outputs = layer.mlp.down.shape
    rng = np.random.default_rng(0)
    first, second = (jnp.asarray(rng.normal(size=size)) for size in ((3, inputs), (outputs, 3)))
    made = adapted(layer, {"mlp.down_proj.lora_A.weight": first, "mlp.down_proj.lora_B.weight": second})
    change = np.asarray(made.mlp.down[...]) - np.asarray(layer.mlp.down[...])
    np.testing.assert_allclose(change, (second @ first).T, atol=1e-5)
    made.mlp.down[...] = layer.mlp.down[...]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(made), nnx.state(layer))

"""Meshes and where parameters lie on them."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax.mesh.sharding import fit_mesh, mesh_of, parameter_sharding
from tests.tiny import decoder

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@pytest.mark.parametrize(("data", "model"), [(8, 1), (2, 4), (1, 2), (1, 1)])
def test_mesh(data: int, model: int) -> None:
    mesh = kvjax.make_mesh(data=data, model=model)
    assert dict(mesh.shape) == {"data": data, "model": model}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 4, "model": 4}, r"data=4 x model=4 takes 16 devices; there are 8 \(cpu\)"),
        ({"data": 2, "devices": jax.devices()[:3]}, r"data=2 x model=1 takes 2 devices; 3 were given"),
        ({"data": 0}, r"data=0: expected an integer in 1 .. 2147483647"),
        ({"model": 2.0}, r"model=2.0: expected an integer in 1 .. 2147483647"),
        ({"data": 2, "devices": jax.devices()[:1] * 2}, r"devices=\[.*\] has a device twice: expected each once"),
        ({"data": np.int8(100), "model": np.int8(100)}, r"data=100 x model=100 takes 10000 devices"),
    ],
)
def test_meshes_that_are_none(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvjax.make_mesh(**sizes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "mlp", "legal"),
    [(8, 2, 48, "1, 2, 4, 8"), (8, 8, 48, "1, 2, 4, 8"), (8, 2, 20, "1, 2, 4"), (28, 4, 28, "1, 2, 4, 28")],
)
def test_sizes_that_fit(heads: int, kv_heads: int, mlp: int, legal: str) -> None:
    config = replace(decoder().config, num_heads=heads, num_kv_heads=kv_heads, mlp_size=mlp)
    with pytest.raises(ValueError, match=f"model=3 does not fit.* {kv_heads} kv heads.*this model are {legal}$"):
        fit_mesh(kvjax.make_mesh(model=3), config)
    fitting = []
    for model in (1, 2, 4, 8):
        if str(model) in legal.split(", "):
            mesh = fit_mesh(kvjax.make_mesh(model=model), config)
            assert mesh.size == model
            assert mesh.shape.get("replica", 1) == max(1, model // kv_heads)
            fitting.append(model)
    assert len(fitting) >= 3


def test_meshes_of_another_kind(tiny) -> None:
    for mesh in (jax.make_mesh((2, 2), ("data", "model")), jax.make_mesh((4,), ("model",))):
        with pytest.raises(ValueError, match=r"expected a mesh of kvjax.make_mesh, with Auto axes"):
            kvjax.shard(tiny, mesh)


@pytest.mark.parametrize(
    ("model", "query", "key", "embed"),
    [
        (2, P(None, "model", None), P(None, "model", None), P("model", None)),
        (4, P(None, ("model", "replica"), None), P(None, "model", None), P(("model", "replica"), None)),
    ],
)
def test_parameters_lie_by_their_axes(model: int, query: P, key: P, embed: P) -> None:
    params = decoder(heads=4, kv_heads=2)
    sharded = kvjax.shard(params, kvjax.make_mesh(data=2, model=model))
    attention, mlp = sharded.layers[0].attention, sharded.layers[0].mlp
    assert attention.value is not None
    assert attention.query[...].sharding.spec == query
    assert attention.key[...].sharding.spec == attention.value[...].sharding.spec == key
    assert attention.output[...].sharding.spec == P(query[1], None, None)
    assert mlp.up[...].sharding.spec == P(None, query[1])
    assert mlp.down[...].sharding.spec == P(query[1], None)
    assert sharded.embed[...].sharding.spec == embed
    assert sharded.norm.scale[...].sharding.is_fully_replicated
    assert mesh_of(params) is None
    assert mesh_of(sharded) == fit_mesh(kvjax.make_mesh(data=2, model=model), params.config)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_array_equal(one, other)
    shares = {shard.data.shape for shard in attention.key[...].addressable_shards}
    assert shares == {(32, 1, 8)}  # a kv head each, and none of them cut


def test_vocabulary_that_does_not_divide(tiny) -> None:
    mesh = fit_mesh(kvjax.make_mesh(model=2), tiny.config)
    _, state = nnx.split(tiny)
    specs = {path: parameter_sharding(mesh, parameter).spec for path, parameter in nnx.to_flat_state(state)}
    assert specs[("embed",)] == P(None, None)
    assert specs[("unembed",)] == P(None, None)
    assert specs[("layers", 1, "mlp", "up")] == P(None, "model")

"""Products of sorted rows: the reference and the Triton kernel against float64, one group after another."""

from functools import partial
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.pallas_kernels import grouped_product
from kvjax.pallas_kernels.grouped_product.tiles import tiles_of
from tests.pallas_kernels.checks import on_gpu

triton = import_module("kvjax.pallas_kernels.grouped_product.triton")
KERNELS = {"xla": grouped_product, "triton": partial(triton.grouped_product, interpret=not on_gpu())}
SIZES = {
    "one row": [0, 1, 0],
    "nothing": [0, 0, 0],
    "empty groups": [0, 70, 0, 0, 1, 33, 0],
    "one group": [41],
    "many groups": list(np.random.default_rng(0).integers(0, 3, 40)),
}


@pytest.mark.parametrize("beyond", [0, 5], ids=["", "rows of no group"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", KERNELS)
def test_each_group_with_its_own_matrix(name, sizes, beyond):
    check(KERNELS[name], sizes, beyond, "float32", (72, 40))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", KERNELS)
def test_half_precision(name, dtype):
    check(KERNELS[name], SIZES["empty groups"], 0, dtype, (64, 100))


def check(kernel, sizes, beyond, dtype, shape):
    """Rows of no group are NaN, and so are the matrices of empty groups: nothing of either is read into a result."""
    rng, used = np.random.default_rng(1), int(np.sum(sizes))
    rows = rng.normal(size=(max(used + beyond, 1), shape[0]))
    rows[used:] = np.nan
    matrices = rng.normal(size=(len(sizes), *shape)) / shape[0] ** 0.5
    matrices[np.equal(sizes, 0)] = np.nan
    rows, matrices = (jnp.asarray(x, dtype) for x in (rows, matrices))
    got = jax.jit(kernel)(rows, matrices, jnp.asarray(sizes, jnp.int32))
    assert got.dtype == jnp.dtype(dtype)
    assert got.shape == (len(rows), shape[1])
    group = np.repeat(np.arange(len(sizes)), sizes)
    expected = np.einsum("mi,mio->mo", np.asarray(rows, np.float64)[:used], np.asarray(matrices, np.float64)[group])
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float64)[:used], expected, atol=tolerance)


@pytest.mark.skipif(on_gpu(), reason="an interpreted kernel begins with NaN")
def test_a_tile_writes_its_own_rows_only():
    """Programs of a GPU run in any order, so that a row of the next tile may be there already."""
    rows, matrices = jnp.ones((9, 16)), jnp.ones((2, 16, 16))
    got = np.asarray(jax.jit(KERNELS["triton"])(rows, matrices, jnp.array([3, 2], jnp.int32)))
    np.testing.assert_array_equal(got[:5], 16)
    assert np.isnan(got[5:]).all()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("height", [1, 16])
def test_tiles_cover_every_row_once(sizes, height):
    found = jax.jit(tiles_of, static_argnums=(1, 2))(jnp.asarray(sizes, jnp.int32), max(sum(sizes), 1), height)
    tiles = jax.tree.map(np.asarray, found)
    covered = [
        (row, int(group))
        for group, first, end in zip(tiles.group, tiles.first, tiles.end, strict=True)
        for row in range(int(first), int(end))
    ]
    assert covered == [(row, group) for row, group in enumerate(np.repeat(np.arange(len(sizes)), sizes))]
    assert int(tiles.used) == sum(-(-size // height) for size in sizes)
    assert all(end - first <= height for _, first, end in zip(*tiles[:3], strict=True))


def test_what_the_kernel_does_not_take():
    rows, sizes = jnp.zeros((4, 16)), jnp.array([4], jnp.int32)
    with pytest.raises(NotImplementedError, match="dtypes bfloat16, float32: expected one of"):
        triton.grouped_product(rows, jnp.zeros((1, 16, 16), jnp.bfloat16), sizes)
    wide = jax.ShapeDtypeStruct((1 << 11, 1 << 10, 1 << 10), jnp.float32)
    with pytest.raises(NotImplementedError, match="2,147,483,648 numbers"):
        jax.eval_shape(triton.grouped_product, jnp.zeros((4, 1 << 10)), wide, jnp.zeros(1 << 11, jnp.int32))

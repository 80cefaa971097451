"""Routes tokens to experts: a token goes to the experts that it takes, and no expert treats any other token.

On a mesh each device has some of the experts of a layer, and all tokens of its rows. It adds up what its experts give,
and the devices add up their sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from kvjax.mesh.sharding import DATA, heads_axes
from kvjax.models import ExpertWeights, Mix, Mixture, gated, routed
from kvjax.pallas_kernels import grouped_product

Activation = Callable[[Array], Array]


def over_experts(mesh: Mesh | None) -> Mix:
    """The function that computes mixtures, on a mesh of `fit_mesh` or on one device."""
    if mesh is None:
        return mixed
    axes, rows = heads_axes(mesh), PartitionSpec(DATA)
    own: Any = PartitionSpec(axes)
    router: Any = PartitionSpec()
    specs = ExpertWeights(router, own, own, own, router, own, own, own, router)

    def mix(
        x: Float[Array, "B N E"],
        weights: ExpertWeights,
        mixture: Mixture,
        activation: Activation,
        judged: Float[Array, "B N E"] | None = None,
    ) -> Float[Array, "B N E"]:
        @partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=(rows, specs, rows),
            out_specs=rows,
            check_vma=False,
        )
        def local(
            x: Float[Array, "B N E"], weights: ExpertWeights, judged: Float[Array, "B N E"] | None
        ) -> Float[Array, "B N E"]:
            if len(weights.gate) == mixture.experts:
                return mixed(x, weights, mixture, activation, judged)
            first = jax.lax.axis_index(axes) * len(weights.gate)
            return jax.lax.psum(mixed(x, weights, mixture, activation, judged, first), axes)

        return local(x, weights, judged)

    return mix


def mixed(
    x: Float[Array, "B N E"],
    weights: ExpertWeights,
    mixture: Mixture,
    activation: Activation,
    judged: Float[Array, "B N E"] | None = None,
    first: Int[Array, ""] | int = 0,
) -> Float[Array, "B N E"]:
    """Returns what the experts of a device give to each token, times the token's shares.

    A GPU gathers the matrices of the chosen experts if there are at most as many choices as experts on the device. XLA
    reads them in the kernel that multiplies, and writes no copy.

    Args:
        weights: of the consecutive experts that the device has, and the router for all experts.
        judged: what the router reads; None for `x`.
        first: the index of the first expert that the device has.
    """
    tokens = x.reshape(-1, x.shape[-1])
    read = tokens if judged is None else judged.reshape(tokens.shape)
    chosen, shares = routed(read, weights.router, mixture, weights.router_bias, weights.factor)
    expert = chosen - first
    mine = (expert >= 0) & (expert < len(weights.gate))
    arguments = tokens, jnp.where(mine, expert, 0), mine, weights
    run = partial(sorted_products, activation=activation, limit=mixture.limit)
    if chosen.size <= len(weights.gate):
        gather = partial(gathered_products, activation=activation, limit=mixture.limit)
        each = jax.lax.platform_dependent(*arguments, cuda=gather, default=run)
    else:
        each = run(*arguments)
    total = jnp.sum(jnp.where(mine[..., None], each, 0) * shares[..., None], axis=1)
    return total.astype(x.dtype).reshape(x.shape)


def sorted_products(
    x: Float[Array, "n E"],
    expert: Int[Array, "n K"],
    mine: Bool[Array, "n K"],
    weights: ExpertWeights,
    *,
    activation: Activation,
    limit: float | None,
) -> Float[Array, "n K E"]:
    """Returns what experts give to each token, by products of the tokens of an expert with its matrices."""
    X = len(weights.gate)
    key = jnp.where(mine, expert, X).reshape(-1)
    order = jnp.argsort(key)
    of_row = jnp.minimum(key[order], X - 1)
    sizes = jnp.bincount(key, length=X + 1)[:X].astype(jnp.int32)
    rows = x[order // expert.shape[1]]

    def times(
        rows: Float[Array, "M I"], matrices: Float[Array, "X I O"], bias: Float[Array, "X O"] | None
    ) -> Float[Array, "M O"]:
        products = grouped_product(rows, matrices, sizes)
        return products if bias is None else products + bias[of_row]

    gate, up = times(rows, weights.gate, weights.gate_bias), times(rows, weights.up, weights.up_bias)
    each = times(gated(gate, up, activation, limit), weights.down, weights.down_bias)
    return jnp.zeros_like(each).at[order].set(each, unique_indices=True).reshape(*expert.shape, -1)


def gathered_products(
    x: Float[Array, "n E"],
    expert: Int[Array, "n K"],
    mine: Bool[Array, "n K"],
    weights: ExpertWeights,
    *,
    activation: Activation,
    limit: float | None,
) -> Float[Array, "n K E"]:
    """The same by products of each token with the matrices of its experts. Others than the device's are not masked.

    Equal tokens, which a GPU may be given, read an expert one after the other, so that it comes from memory once.
    """
    flat = expert.T.reshape(-1)
    rows = jnp.tile(x, (expert.shape[1], 1))

    def times(
        rows: Float[Array, "M I"], matrices: Float[Array, "X I O"], bias: Float[Array, "X O"] | None
    ) -> Float[Array, "M O"]:
        products = jnp.einsum("mi,mio->mo", rows, matrices[flat])
        return products if bias is None else products + bias[flat]

    gate, up = times(rows, weights.gate, weights.gate_bias), times(rows, weights.up, weights.up_bias)
    each = times(gated(gate, up, activation, limit), weights.down, weights.down_bias)
    return jnp.swapaxes(each.reshape(*expert.T.shape, -1), 0, 1)

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
from jaxtyping import Array, Float, Int

from kvjax.mesh.sharding import DATA, heads_axes
from kvjax.models import ExpertWeights, Mix, Mixture, gated, routed
from kvjax.pallas_kernels import Times, by_group

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

    Args:
        weights: of the consecutive experts that the device has, and the router for all experts.
        judged: what the router reads; None for `x`.
        first: the index of the first expert that the device has.
    """
    tokens, X = x.reshape(-1, x.shape[-1]), len(weights.gate)
    read = tokens if judged is None else judged.reshape(tokens.shape)
    chosen, shares = routed(read, weights.router, mixture, weights.router_bias, weights.factor)
    expert = chosen - first
    mine = (expert >= 0) & (expert < X)

    def of_experts(rows: Float[Array, "M E"], times: Times) -> Float[Array, "M E"]:
        gate, up = times(rows, weights.gate, weights.gate_bias), times(rows, weights.up, weights.up_bias)
        return times(gated(gate, up, activation, mixture.limit), weights.down, weights.down_bias)

    each = by_group(of_experts, tokens, jnp.where(mine, expert, X), X)
    total = jnp.sum(jnp.where(mine[..., None], each, 0) * shares[..., None], axis=1)
    return total.astype(x.dtype).reshape(x.shape)

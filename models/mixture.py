"""A mixture of experts: how many MLPs a layer has, which of them a token takes, and what their results are worth.

As with attention, the function that computes a mixture is an argument of the decoder. `densely` defines the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .routing import SigmoidRouting


@dataclass(frozen=True)
class Mixture:
    """The static description of the layers that have experts, instead of one MLP or beside it.

    Attributes:
        experts: X.
        per_token: K, the number of experts that a token takes.
        size: F of an expert.
        normalized: whether a token's K shares are divided by their sum.
        dense_layers: the indices of the layers with an ordinary MLP.
        biased: whether the router and the three matrices of each expert have biases.
        limit: c of `gated`, which clamps gate and up; None for a product of the two.
        shared: F of an MLP that every token takes beside its experts; None for no such MLP.
        shared_gate: whether what that MLP gives is multiplied by sigmoid(x w).
        sigmoid: the choice of experts by independent scores; None for that by a softmax.
        beside_mlp: whether layers have experts beside an MLP (`ExpertsBeside`), and not instead of one.
    """

    experts: int
    per_token: int
    size: int
    normalized: bool = True
    dense_layers: tuple[int, ...] = ()
    biased: bool = False
    limit: float | None = None
    shared: int | None = None
    shared_gate: bool = True
    sigmoid: SigmoidRouting | None = None
    beside_mlp: bool = False


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts. Biases are None if the mixture has none, as is the factor of each share."""

    router: Float[Array, "E X"]
    gate: Float[Array, "X E F"]
    up: Float[Array, "X E F"]
    down: Float[Array, "X F E"]
    router_bias: Float[Array, "X"] | None = None
    gate_bias: Float[Array, "X F"] | None = None
    up_bias: Float[Array, "X F"] | None = None
    down_bias: Float[Array, "X E"] | None = None
    factor: Float[Array, "X"] | None = None


class Mix(Protocol):
    """Computes the mixture of a layer for each token, from its hidden states after the norm.

    The router reads `judged`, or the same hidden states if that is None.
    """

    def __call__(
        self,
        x: Float[Array, "B N E"],
        weights: ExpertWeights,
        mixture: Mixture,
        activation: Callable[[Array], Array],
        judged: Float[Array, "B N E"] | None = None,
        /,
    ) -> Float[Array, "B N E"]: ...


def routed(
    x: Float[Array, "... E"],
    router: Float[Array, "E X"],
    mixture: Mixture,
    bias: Float[Array, "X"] | None = None,
    factor: Float[Array, "X"] | None = None,
) -> tuple[Int[Array, "... K"], Float[Array, "... K"]]:
    """Returns the experts that each token takes, best first, and their shares in float32.

    The shares are the softmax over all experts, of the K chosen ones. Of equal experts, the first ones are chosen. With
    `normalized` shares this is the softmax over the K chosen ones alone. The bias is added to the logits. The
    factor multiplies shares. With `Mixture.sigmoid`, that has the choice, the shares and the bias.
    """
    logits = jnp.einsum("...E,EX->...X", x, router, preferred_element_type=jnp.float32)
    if mixture.sigmoid is not None:
        assert bias is not None
        return mixture.sigmoid(logits, mixture.per_token, mixture.normalized, bias.astype(jnp.float32))
    if bias is not None:
        logits += bias
    shares, chosen = jax.lax.top_k(jax.nn.softmax(logits), mixture.per_token)
    if mixture.normalized:
        shares /= jnp.sum(shares, axis=-1, keepdims=True)
    return chosen, shares if factor is None else shares * factor[chosen]


def gated(
    gate: Float[Array, "*n F"], up: Float[Array, "*n F"], activation: Callable[[Array], Array], limit: float | None
) -> Float[Array, "*n F"]:
    """Returns activation(gate) up, or activation(min(gate, c)) (clip(up, -c, c) + 1) with a limit c."""
    if limit is None:
        return activation(gate) * up
    return activation(jnp.minimum(gate, limit)) * (jnp.clip(up, -limit, limit) + 1)


def densely(
    x: Float[Array, "B N E"],
    weights: ExpertWeights,
    mixture: Mixture,
    activation: Callable[[Array], Array],
    judged: Float[Array, "B N E"] | None = None,
) -> Float[Array, "B N E"]:
    """The definition: every expert treats every token, and those that a token did not choose have a share of 0."""
    judged = x if judged is None else judged
    chosen, shares = routed(judged, weights.router, mixture, weights.router_bias, weights.factor)
    share = jnp.sum(jax.nn.one_hot(chosen, mixture.experts) * shares[..., None], axis=-2)

    def plus(products: Float[Array, "B N X O"], bias: Float[Array, "X O"] | None) -> Float[Array, "B N X O"]:
        return products if bias is None else products + bias

    gate = plus(jnp.einsum("BNE,XEF->BNXF", x, weights.gate), weights.gate_bias)
    up = plus(jnp.einsum("BNE,XEF->BNXF", x, weights.up), weights.up_bias)
    inner = gated(gate, up, activation, mixture.limit)
    down = jnp.einsum("BNXF,XFE->BNXE", inner, weights.down, preferred_element_type=jnp.float32)
    each = plus(down, weights.down_bias)
    return jnp.einsum("BNXE,BNX->BNE", each, share).astype(x.dtype)

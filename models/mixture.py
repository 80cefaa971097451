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


@dataclass(frozen=True)
class Mixture:
    """The static description of the layers that have experts instead of one MLP.

    Attributes:
        experts: X.
        per_token: K, the number of experts that a token takes.
        size: F of an expert.
        normalized: whether a token's K shares are divided by their sum.
        dense_layers: the indices of the layers with an ordinary MLP.
    """

    experts: int
    per_token: int
    size: int
    normalized: bool = True
    dense_layers: tuple[int, ...] = ()


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts."""

    router: Float[Array, "E X"]
    gate: Float[Array, "X E F"]
    up: Float[Array, "X E F"]
    down: Float[Array, "X F E"]


class Mix(Protocol):
    """Computes the mixture of a layer for each token, from its hidden states after the norm."""

    def __call__(
        self,
        x: Float[Array, "B N E"],
        weights: ExpertWeights,
        mixture: Mixture,
        activation: Callable[[Array], Array],
        /,
    ) -> Float[Array, "B N E"]: ...


def routed(
    x: Float[Array, "... E"], router: Float[Array, "E X"], mixture: Mixture
) -> tuple[Int[Array, "... K"], Float[Array, "... K"]]:
    """Returns the experts that each token takes, best first, and their shares in float32.

    The shares are the softmax over all experts, of the K chosen ones. Of equal experts, the first ones are chosen.
    """
    logits = jnp.einsum("...E,EX->...X", x, router, preferred_element_type=jnp.float32)
    shares, chosen = jax.lax.top_k(jax.nn.softmax(logits), mixture.per_token)
    if mixture.normalized:
        shares /= jnp.sum(shares, axis=-1, keepdims=True)
    return chosen, shares


def densely(
    x: Float[Array, "B N E"], weights: ExpertWeights, mixture: Mixture, activation: Callable[[Array], Array]
) -> Float[Array, "B N E"]:
    """The definition: every expert treats every token, and those that a token did not choose have a share of 0."""
    chosen, shares = routed(x, weights.router, mixture)
    share = jnp.sum(jax.nn.one_hot(chosen, mixture.experts) * shares[..., None], axis=-2)
    gate, up = jnp.einsum("BNE,XEF->BNXF", x, weights.gate), jnp.einsum("BNE,XEF->BNXF", x, weights.up)
    each = jnp.einsum("BNXF,XFE->BNXE", activation(gate) * up, weights.down, preferred_element_type=jnp.float32)
    return jnp.einsum("BNXE,BNX->BNE", each, share).astype(x.dtype)

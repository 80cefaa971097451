"""Maps tokens to what the layers take: the first hidden states, and the inputs of each layer beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from .layer_inputs import LayerInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Embedding:
    """The vectors of tokens.

    Attributes:
        matrix: [V, E].
        scale: the factor of the matrix, rounded to its dtype.
        inputs: computes the inputs of layers; None if layers have none.
    """

    matrix: nnx.Param
    scale: float = field(default=1.0, metadata={"static": True})
    inputs: LayerInputs | None = None

    def __call__(self, tokens: Int[Array, "B N"]) -> tuple[Float[Array, "B N E"], Float[Array, "B N L P"] | None]:
        """Returns the first hidden states, and the inputs of all layers."""
        x = self.matrix[...][tokens]
        if self.scale != 1:
            x = x * jnp.asarray(self.scale, x.dtype)
        return x, None if self.inputs is None else self.inputs(tokens, x)


def of_layer(given: Float[Array, "B N L P"] | None, index: int | Int[Array, ""]) -> Float[Array, "B N P"] | None:
    """Returns the inputs of one layer, by its index."""
    return None if given is None else jax.lax.dynamic_index_in_dim(given, index, axis=2, keepdims=False)

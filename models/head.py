"""Maps hidden states to the logits of the next token."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from ..pallas_kernels import capped
from .config import DecoderConfig
from .norm import RMSNorm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Head:
    """The last norm and the product with the vocabulary.

    Attributes:
        config: the architecture.
        norm: the last norm.
        matrix: the unembedding [E, V], or the embedding [V, E] if they are tied.
    """

    config: DecoderConfig = field(metadata={"static": True})
    norm: RMSNorm
    matrix: nnx.Param

    def __call__(self, hidden: Float[Array, "... E"]) -> Float[Array, "... V"]:
        """Returns next-token logits in float32."""
        hidden = self.norm(hidden)
        form = "VE" if self.config.tie_embeddings else "EV"
        logits = jnp.einsum(f"...E,{form}->...V", hidden, self.matrix[...], preferred_element_type=jnp.float32)
        if self.config.logit_divisor != 1:
            logits /= self.config.logit_divisor
        return capped(logits, self.config.logit_softcap)

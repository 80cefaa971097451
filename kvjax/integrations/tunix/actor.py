"""A decoder of kvjax as the model that tunix trains."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kvjax.attend.causal import causal
from kvjax.checks import check_params
from kvjax.models import Decoder


class KVJaxActor(nnx.Module):
    """A `Decoder` with the call that tunix's trainer makes, so that any family of kvjax can be trained.

    It attends to whole sequences without a cache, and is differentiable. `KVJaxRollout` decodes from the same arrays.

    Args:
        decoder: what `kvjax.load` returns. The actor has its arrays, not copies.

    Raises:
        ValueError: `decoder` is no Decoder, or has recurrent layers, which would read padding.
    """

    def __init__(self, decoder: Decoder):
        check_params(decoder)
        if decoder.config.recurrence is not None:
            raise ValueError(
                f"a decoder of family {decoder.config.family!r} with recurrent layers: expected attention in all layers"
            )
        graph, state = nnx.split(decoder)
        # Without the names of axes, which tunix would look for in its mesh.
        plain = {path: type(variable)(variable[...]) for path, variable in nnx.to_flat_state(state)}
        self.decoder: Decoder = nnx.merge(graph, nnx.from_flat_state(plain))
        self.config = decoder.config  # tunix reads the number of layers and of heads

    def __call__(
        self,
        input_tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        cache: None = None,
        attention_mask: Bool[Array, "B N N"] | None = None,
    ) -> tuple[Float[Array, "B N V"], None]:
        """Returns the float32 logits of all tokens.

        Args:
            input_tokens: token ids. Padding may precede and follow the tokens of a row.
            positions: the position of each token.
            cache: None; answers are decoded by `KVJaxRollout`.
            attention_mask: causal, without the columns of padding; None if there is none.

        Raises:
            ValueError: a cache is given.
        """
        if cache is not None:
            raise ValueError("a KVJaxActor was given a cache: expected rollout_engine=KVJaxRollout, which has its own")
        valid = None if attention_mask is None else jnp.diagonal(attention_mask, axis1=1, axis2=2)
        hidden, _ = self.decoder(input_tokens, causal(positions, valid=valid))
        return self.decoder.logits(hidden), None

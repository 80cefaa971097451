"""The interface between the decoder and attention functions, with the facts of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .rope import Rope

Gate: TypeAlias = Callable[[Float[Array, "B N E"]], Float[Array, "B H N"]]  # a number per kv head and token


@dataclass(frozen=True)
class AttentionLayer:
    """The facts about a layer that its attention function receives.

    Attributes:
        index: the layer's index, from 0; a traced integer where layers share a trace or a program.
        rope: the rotary position embedding.
        window: the sliding window in tokens, or None for full attention.
        scale: the softmax scale.
        softcap: the soft cap of the scaled attention logits, or None.
        output: the weight of the attention output projection.
        sinks: the logit of each query head that `join_sinks` adds to each softmax, or None.
        statistics: float32 statistics of this layer's queries by name, per query head or kv head, such as those of
            `kvjax.with_statistics`.
        alone: whether the cache that is passed along is that of this layer only.
        lends: whether the attention function returns a pair in place of the cache: the cache, and one with the entries
            that the queries met, for layers that read them.
        hidden: the hidden states that q, k and v of a call are projected from, after the norm before attention if the
            family has one; None outside of a call.
        residual: the residual stream that enters the layer, before any norm; None outside of a call.
        gates: the networks of this layer that read hidden states, by name; None outside of a call.
    """

    index: int | Int[Array, ""]
    rope: Rope
    window: int | None
    scale: float
    output: Float[Array, "Hq D E"]
    alone: bool = False
    lends: bool = False
    softcap: float | None = None
    sinks: Float[Array, "Hq"] | None = None
    statistics: Mapping[str, Float[Array, "heads *rest"]] | None = None
    hidden: Float[Array, "B N E"] | None = None
    residual: Float[Array, "B N E"] | None = None
    gates: Mapping[str, Gate] | None = None

    def hidden_as(self, form: str) -> Float[Array, "B N E"] | None:
        """Returns the hidden states of a call that are "normed", or "residual" as they enter the layer; None for ""."""
        return {"": None, "normed": self.hidden, "residual": self.residual}[form]

    @property
    def weights(self) -> dict[str, Any]:
        """The fields that hold arrays. They are sharded over query heads, and `statistics` over kv heads."""
        return {"output": self.output, "sinks": self.sinks, "statistics": self.statistics}

    @property
    def logits(self) -> dict[str, Any]:
        """The options of every attention operation that say how logits follow from queries and keys."""
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap}

    @property
    def place(self) -> int:
        """The place of this layer in the cache that is passed along."""
        return 0 if self.alone else int(self.index)


def join_sinks(
    context: Float[Array, "B Hq N D"], lse: Float[Array, "B Hq N"], sinks: Float[Array, "Hq"] | None
) -> tuple[Float[Array, "B Hq N D"], Float[Array, "B Hq N"]]:
    """Returns context and log-sum-exp of softmaxes that attention sinks (arXiv 2508.10925) have joined.

    A sink s of a head is one more logit of each softmax, without a value. From a softmax without it follow

        context' = context exp(lse - lse'),    lse' = log(exp(lse) + exp(s)).

    A sink must join once, after all keys. Queries that see no key keep a context of 0 and a log-sum-exp of -inf.

    Args:
        context: without sinks.
        lse: likewise, in float32.
        sinks: None returns the other arguments.
    """
    if sinks is None:
        return context, lse
    own = sinks.astype(jnp.float32)[:, None]
    share = jax.nn.sigmoid(lse - own)[..., None]
    joined = jnp.where(jnp.isneginf(lse), lse, jnp.logaddexp(lse, own))
    return (context.astype(jnp.float32) * share).astype(context.dtype), joined


class Attend(Protocol):
    """An attention function. It rotates q and k, attends, and returns the context and the updated cache.

    Layers that read another layer's entries call it without k and v.
    """

    def __call__(
        self,
        layer: AttentionLayer,
        q: Float[Array, "B Hq N D"],
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        cache: Any,
        /,
    ) -> tuple[Float[Array, "B Hq N D"], Any]: ...


def lending(attend: Attend) -> Attend:
    """Returns an attention function for calls without a cache, in which readers attend to the keys that they read."""
    held: dict[Any, tuple[Any, Any]] = {}

    def attend_lent(layer: AttentionLayer, q: Any, k: Any, v: Any, cache: Any) -> tuple[Any, Any]:
        if k is not None:
            held[layer.index] = k, v
        return attend(layer, q, *held[layer.index], cache)

    return attend_lent

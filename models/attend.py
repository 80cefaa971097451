"""What the decoder asks of an attention function, and what it tells it about a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from .rope import Rope


@dataclass(frozen=True)
class AttentionLayer:
    """The facts about a layer that its attention function receives.

    Attributes:
        index: the layer's index, from 0; a traced integer where one program runs several layers in turn.
        rope: the rotary position embedding.
        window: the sliding window in tokens, or None for full attention.
        scale: the softmax scale.
        softcap: the soft cap of the scaled attention logits, or None.
        output: the weight of the attention output projection.
        alone: whether the cache that is passed along is that of this layer only.
    """

    index: int | Int[Array, ""]
    rope: Rope
    window: int | None
    scale: float
    output: Float[Array, "Hq D E"]
    alone: bool = False
    softcap: float | None = None

    @property
    def logits(self) -> dict[str, Any]:
        """The options of every attention operation that say how logits follow from queries and keys."""
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap}

    @property
    def place(self) -> int:
        """The place of this layer in the cache that is passed along."""
        return 0 if self.alone else int(self.index)


class Attend(Protocol):
    """An attention function. It rotates q and k, attends, and returns the context and the updated cache."""

    def __call__(
        self,
        layer: AttentionLayer,
        q: Float[Array, "B Hq N D"],
        k: Float[Array, "B H N D"],
        v: Float[Array, "B H N D"],
        cache: Any,
        /,
    ) -> tuple[Float[Array, "B Hq N D"], Any]: ...

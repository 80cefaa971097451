"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): its sizes, as static facts of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Latent:
    """The sizes of attention over latents. `DecoderConfig` has one kv head of C + R channels beside it.

    Attributes:
        rank: R, the number of channels of a token's latent, from which all heads take keys and values.
        rotated: C, the number of channels that RoPE rotates, of each query head and of the key that all heads share.
        unrotated: P, the number of channels of a head's query and key that RoPE does not rotate.
        value: the number of channels of a head's value.
        query_rank: the number of channels of the latent of queries; None if queries come from hidden states.
        paired: whether the pairs of rotated channels are neighbours in the checkpoint.
        growth: the factor of the square root of the softmax scale, of models with extended contexts.
    """

    rank: int
    rotated: int
    unrotated: int
    value: int
    query_rank: int | None = None
    paired: bool = True
    growth: float = 1.0

    @property
    def head_dim(self) -> int:
        """The number of channels of a head's query and key: P + C."""
        return self.unrotated + self.rotated

    @property
    def key_dim(self) -> int:
        """D, the number of channels of what a cache holds as the key of a token: C + R."""
        return self.rotated + self.rank

    @property
    def rotated_fraction(self) -> float:
        """A number whose product with D is C, or exceeds it by rounding, as `Rope.channels` truncates it."""
        return math.nextafter(self.rotated / self.key_dim, 1)

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.head_dim**-0.5 * self.growth**2

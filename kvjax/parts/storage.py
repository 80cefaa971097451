"""How keys and values are held in the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Array, Float

from kvjax.pallas_kernels import QuantizedArray
from kvjax.protocols import Storage, check_integer


@dataclass(frozen=True)
class Quantized(Storage):
    """In 8 or 4 bits a number, with a scale in bfloat16 for each token and group of channels.

    bits / 8 * D + 2 * D / group bytes a key, and as many a value. It communicates nothing.

    Attributes:
        bits: 8 or 4.
        group: channels that share a scale, a divisor of the head size D; None: the greatest common divisor of D and 32.
    """

    bits: int = 8
    group: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in (8, 4):
            raise ValueError(f"bits={self.bits!r}: accepted are 8 and 4")
        if self.group is not None:
            check_integer("group", self.group, least=1)

    def store(self, x: Float[Array, "*tokens D"]) -> QuantizedArray:
        D = x.shape[-1]
        group = math.gcd(D, 32) if self.group is None else self.group
        if D % group:
            divisors = ", ".join(str(n) for n in range(1, D + 1) if D % n == 0)
            raise ValueError(f"group={group} of heads of {D} channels; accepted are divisors of it: {divisors}")
        if D * self.bits % 8:
            raise ValueError(f"bits={self.bits} of heads of {D} channels: two share a byte; accepted is bits=8")
        return QuantizedArray.of(x, self.bits, group)

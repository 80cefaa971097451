"""Quantised cache, after KIVI (Liu et al., ICML 2024, arXiv 2402.02750): stores keys and values in 8 or 4 bits.

Differences from KIVI:

- There is one scale per token and group of channels, for keys too, so that any slot can be overwritten. Small groups
  separate large channels from others. KIVI scales keys per channel over blocks of tokens, because some channels are
  large.
- Codes are symmetric, and the bytes of a zero point buy smaller groups. KIVI has a zero point.
- A token is quantised before anything attends to it. KIVI stores the newest tokens in full precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Array, Float

from kvjax.pallas_kernels import QuantizedArray
from kvjax.policy import PLAIN, Policy, Storage, check_choice, check_integer, check_kind

from .full import full
from .registry import preset

FULL = full()


@dataclass(frozen=True)
class Quantized(Storage):
    """Keys and values in 8 or 4 bits per number, with a bfloat16 scale for each token and group of channels.

    A key takes bits / 8 * D + 2 * D / group bytes, and so does a value. The storage communicates nothing between
    devices.

    Attributes:
        bits: 8 or 4.
        group: the number of channels that share a scale, a divisor of the head size D. None is the greatest common
            divisor of D and 32.
    """

    bits: int = 8
    group: int | None = None

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, 8, 4)
        if self.group is not None:
            check_integer("group", self.group, least=1)

    def store(self, x: Float[Array, "*tokens D"]) -> QuantizedArray:
        D = x.shape[-1]
        group = math.gcd(D, 32) if self.group is None else self.group
        if D % group:
            divisors = ", ".join(str(n) for n in range(1, D + 1) if D % n == 0)
            raise ValueError(f"group={group}: expected a divisor of the head size {D}: {divisors}")
        if D * self.bits % 8:
            raise ValueError(f"bits={self.bits}: expected bits=8 for heads of {D} channels, as two codes share a byte")
        return QuantizedArray.of(x, self.bits, group)


@preset
def quantize(policy: Policy = FULL, bits: Literal[8, 4] = 8, group: int | None = None) -> Policy:
    """Stores the keys and values of a policy as codes of 8 or 4 bits. The entries are those that the policy retains.

    For the channels c of a group g of one token, rounded to the nearest integer, ties to the even one,

        x_c = s_g code_c,    code_c = round(x_c / s_g),    s_g = max |x_c| / 127 (or 7) in bfloat16

    A token is quantised as it comes in, before anything attends to it. Every query, score and merge therefore sees the
    stored values, both in the call that reads a token and in later calls, and a prompt read in chunks equals the prompt
    read at once. Entries that a merge changes are quantised anew; all others keep their codes.

    Args:
        policy: decides what is retained; one that stores keys and values as they are.
        bits: the size of a code, 8 or 4. Two codes of 4 bits share a byte.
        group: the number of channels that share a scale, a divisor of the head size D. None is the greatest common
            divisor of D and 32. A slot of a kv head takes 2 (D bits / 8 + 2 D / group) bytes, and 4 of its position.

    Raises:
        ValueError: for a value that is not accepted, or a policy that stores its cache in another form already. For a
            `group` or `bits` that does not fit the head size, once a model is known.
    """
    check_kind("policy", policy, Policy)
    if policy.storage != PLAIN:
        raise ValueError("its policy already stores keys and values in another form; choose one that stores arrays")
    return replace(policy, storage=Quantized(bits, group))

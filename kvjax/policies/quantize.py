"""Any policy in 8 or 4 bits. Background: KIVI (Liu et al., ICML 2024, arXiv 2402.02750), whose keys go by channel."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from kvjax.parts import Quantized
from kvjax.policy import Policy
from kvjax.protocols import AS_THEY_ARE

from .full import full

FULL = full()


def quantize(policy: Policy = FULL, bits: Literal[8, 4] = 8, group: int | None = None) -> Policy:
    """Holds the keys and values of a policy as codes of 8 or 4 bits, and keeps the entries that the policy keeps.

    x_c = s_g code_c for the channels c of a group g of one token, with s_g = max |x_c| / 127 (or 7) in bfloat16 and
    code_c = x_c / s_g to the nearest integer, of two the even one. KIVI scales keys by channel, over blocks of tokens,
    because some channels are large; here a token must be written and overwritten alone, so large channels are kept from
    others by small groups. The scale is symmetric: what a zero point would take, a smaller group takes
    as well.

    A token is quantised as it comes in, before anything attends to it: each query, score and merge sees what the cache
    holds, in the call that reads a token and in those after it alike, so that a prompt read in chunks is the prompt
    read at once. Entries that a merge changes are quantised anew, all others keep their codes.

    Args:
        policy: decides what is kept; one that is not quantised.
        bits: of a code, 8 or 4; two of 4 bits share a byte.
        group: channels that share a scale, a divisor of the head size D; by default its greatest common divisor with
            32. A slot of a kv head takes 2 (D bits / 8 + 2 D / group) bytes and 4 of its position.
    """
    if policy.storage != AS_THEY_ARE:
        raise ValueError(f"quantize of a policy that is quantised: {policy.storage}; accepted is one that is not")
    return replace(policy, storage=Quantized(bits, group))

"""Key re-rotation (kvpress's KeyRerotationPress, as in FINCH): retained keys are rotated to consecutive positions.

Difference from kvpress: keys are cached before RoPE and rotated in each call, so that no rounding adds up.
"""

from __future__ import annotations

from dataclasses import replace

from kvjax.policy import Policy, check_kind

from .registry import preset
from .snapkv import snapkv

SNAPKV = snapkv()


@preset
def key_rerotation(base: Policy = SNAPKV) -> Policy:
    """Retains what the base retains, at consecutive positions: distances are those in the cache, not in the text.

    Key c, the n-th that its head retains, is rotated as if it stood at position n, and what follows stands behind the
    retained entries. The prompt itself is read and scored at its own positions. Each step rotates all keys again.

    Args:
        base: the policy that gives everything else.

    Raises:
        ValueError: for a value that is not accepted, and for a base that keeps queries and evicts while decoding, whose
            budget is allocated, or whose score needs keys at their own positions.
    """
    check_kind("base", base, Policy)
    return replace(base, positions="in_cache")

"""Key re-rotation (kvpress's KeyRerotationPress, as in FINCH, arXiv 2408.00167): moves keys to consecutive positions.

Differences from kvpress:

- Keys are cached before RoPE and rotated in each call, so that no rounding adds up. kvpress rotates the retained keys
  once.
- A score that keeps queries sees keys at the positions where these queries saw them.
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

        position of the n-th key that a head retains = n

    What follows stands behind the retained entries. The prompt itself is read and scored at its own positions. Each
    step rotates all keys again.

    Args:
        base: the policy that defines everything else.

    Raises:
        ValueError: for a value that is not accepted, and for a base that keeps queries and evicts while decoding, whose
            budget is allocated, or whose score needs keys at their own positions.
    """
    check_kind("base", base, Policy)
    return replace(base, positions="in_cache")

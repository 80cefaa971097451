"""Work on parts of a prompt one after another, so that the intermediate arrays of all parts do not exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

AT_ONCE = 8  # parts that follow one another without a loop: the host of a GPU starts each round of a prompt's loop


def in_turns(function: Callable[[Any], Any], parts: Any) -> Any:
    """Returns what `jax.lax.map(function, parts)` returns. Up to AT_ONCE parts need no loop.

    Args:
        parts: arrays whose first axis counts the parts.
    """
    return jax.lax.scan(lambda _, part: (None, function(part)), None, parts, unroll=AT_ONCE)[1]

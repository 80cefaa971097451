"""The modes of JAX that kvjax computes in, whatever the caller has set.

Types and ranks of kvjax's arrays are declared, so the caller's rules for promoting them, and 64-bit types, have no part
in them. Prompts come from the host and answers go there, so a guard against transfers stops at kvjax's door.
`jax.disable_jit`, `jax_debug_nans` and all other modes stay as the caller has set them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def own_modes() -> Iterator[None]:
    """Sets the modes within a block, or within the function that it decorates."""
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.transfer_guard("allow"),
    ):
        yield

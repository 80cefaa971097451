"""Compiled programs: the folder that keeps them from one process to the next, and what tells them apart."""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any


def keep_compiled() -> None:
    """Stores compiled programs in the user's cache folder, so that only the first run of a command compiles them.

    The environment variable JAX_COMPILATION_CACHE_DIR sets another folder. An empty value disables the cache.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "kvjax" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def key_of(program: Any, args: tuple[Any, ...], static: dict[str, Any]) -> Hashable:
    """Returns what a call of a jitted function runs: the function, its static arguments, the shapes of all others."""
    import jax

    leaves, tree = jax.tree.flatten(args)
    return program, tree, tuple((x.shape, x.dtype) for x in leaves), tuple(static.items())

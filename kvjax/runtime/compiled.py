"""The folder that keeps compiled programs from one process to the next."""

from __future__ import annotations

import os
from pathlib import Path


def keep_compiled() -> None:
    """Stores compiled programs in the user's cache folder, so that only the first run of a command compiles them.

    The environment variable JAX_COMPILATION_CACHE_DIR sets another folder. An empty value disables the cache.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "kvjax" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

"""Flags of XLA that a GPU's decode loop wants, and its memory. A program sets them before JAX finds its devices."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from importlib.util import find_spec

# CUDA graphs that include loops: the decode loop is then one graph, and so are the loops of a step that evicts from a
# pool. The host launches it once.
FLAGS = {"--xla_gpu_enable_command_buffer": "+WHILE"}
# The compiler's options for a program of decode steps, whatever the device. XLA multiplies one array with several
# weights in one kernel if they are smaller than this. A GPU then reads both weights of the MLP's inputs in one kernel.
STEP_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 100_000}
# JAX takes 75 % of a GPU unless it is told. The rest of an 80 GB card is 31 % more rows of an 8B in bfloat16.
MEMORY = "XLA_CLIENT_MEM_FRACTION", "0.92"
MEMORY_NAMES = (MEMORY[0], "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE")
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def set_gpu_flags(environment: MutableMapping[str, str] = os.environ) -> None:
    """Adds to XLA_FLAGS those of the flags that it does not set, if JAX's plugin for NVIDIA GPUs is installed.

    JAX may then take 92 % of a GPU's memory, unless a variable already says how much it takes.
    """
    if not any(map(find_spec, PLUGINS)):
        return
    given = environment.get("XLA_FLAGS", "")
    missing = [f"{name}={value}" for name, value in FLAGS.items() if name not in given]
    environment["XLA_FLAGS"] = " ".join(filter(None, [given, *missing]))
    if not any(name in environment for name in MEMORY_NAMES):
        environment[MEMORY[0]] = MEMORY[1]

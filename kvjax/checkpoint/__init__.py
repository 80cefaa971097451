"""Reads and writes checkpoints: Hugging Face folders of safetensors, and Orbax. It reads GGUF files, too.

It never unpickles, and never runs remote code.

`CheckpointError` is the only exception that this package defines. `kvjax.models` explains the axis letters of shapes.
"""

from kvjax.checkpoint.convert import Conversion, plan_conversion
from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.folder import DTYPES, form_of, locate
from kvjax.checkpoint.hf import load, read_headers, save_hf
from kvjax.checkpoint.named import dtype_named, load_named, mesh_sizes
from kvjax.checkpoint.orbax import restore, save
from kvjax.checkpoint.parameters import Progress
from kvjax.checkpoint.source import Source, source_of

__all__ = [
    "DTYPES",
    "CheckpointError",
    "Conversion",
    "Progress",
    "Source",
    "dtype_named",
    "form_of",
    "load",
    "load_named",
    "locate",
    "mesh_sizes",
    "plan_conversion",
    "read_headers",
    "restore",
    "save",
    "save_hf",
    "source_of",
]

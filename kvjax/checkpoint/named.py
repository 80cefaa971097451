"""Models as commands and grids name them: a folder of either form or a name on the hub, a dtype, a mesh."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.checkpoint.folder import DTYPES, form_of
from kvjax.checkpoint.hf import load
from kvjax.checkpoint.orbax import restore
from kvjax.models import Decoder
from kvjax.sharding import make_mesh

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_named(
    model: str, dtype: str | None = None, mesh: tuple[int, int] = (1, 1)
) -> tuple[Decoder, PreTrainedTokenizerBase]:
    """A decoder and its tokenizer, for prompts of text.

    Args:
        model: a folder in Hugging Face or Orbax form, or a name on the hub.
        dtype: of the weights, as `dtype_named` takes it.
        mesh: data x model; (1, 1) is the default device.

    Raises:
        ValueError: what cannot be loaded, has no tokenizer, or does not fit the mesh; a dtype or mesh that is not.
    """
    devices, wanted = None if mesh == (1, 1) else make_mesh(*mesh), dtype_named(dtype)
    read = restore if form_of(Path(model).expanduser()) == "orbax" else load
    params, tokenizer = read(model, wanted, devices)
    if tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, which prompts of text need")
    return params, tokenizer


def dtype_named(name: str | None) -> Any:
    """The dtype of that name, None for None. Raises ValueError."""
    accepted = {str(dtype): dtype for dtype in DTYPES.values()}
    if name is not None and name not in accepted:
        raise ValueError(f"dtype {name!r} is not supported; accepted: {', '.join(accepted)}")
    return name and accepted[name]


def mesh_sizes(text: str) -> tuple[int, int]:
    """The sizes of a mesh, DATAxMODEL. Raises ValueError."""
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if sizes is None:
        raise ValueError(f"mesh {text!r}; accepted is DATAxMODEL, two integers >= 1, such as 2x4")
    return int(sizes[1]), int(sizes[2])

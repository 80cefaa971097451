"""From one form of checkpoint to another, or to another dtype: what it will take, and doing it."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.checkpoint.folder import CheckpointError, check_dtype, form_of, locate, read_config
from kvjax.checkpoint.hf import load, read_headers, save_hf
from kvjax.checkpoint.orbax import restore, save, transfer_bytes
from kvjax.checkpoint.parameters import Blank, Progress
from kvjax.checkpoint.tensors import no_weights

Target = Literal["hf", "orbax"]
PROCESS = 300_000_000  # Python, JAX and a tokenizer
GENERATION = "generation_config.json"  # of no use to kvjax, but of use to transformers


@dataclass(frozen=True)
class Conversion:
    """A checkpoint that can be converted.

    Attributes:
        source: its folder.
        form: `hf` or `orbax`.
        out: the folder to write.
        to: the form to write.
        dtype: the dtype that its weights are to have.
        parameters: how many there are.
        parameter_bytes: what they take in that dtype.
        peak_bytes: about the host memory that converting takes: all parameters, and a few tensors on their way.
    """

    source: Path
    form: Target
    out: Path
    to: Target
    dtype: np.dtype
    parameters: int
    parameter_bytes: int
    peak_bytes: int

    def run(self, reading: Progress | None = None, writing: Progress | None = None) -> None:
        """Converts, on the CPU. Of its progress Orbax tells nothing. Raises CheckpointError as of `load`, `restore`."""
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            if self.form == "hf":
                params, tokenizer = load(self.source, self.dtype, progress=reading)
            else:
                params, tokenizer = restore(self.source, self.dtype)
            if self.to == "hf":
                save_hf(params, self.out, tokenizer, progress=writing)
            else:
                save(params, self.out, tokenizer, overwrite=True)
        if (self.source / GENERATION).is_file():
            shutil.copy(self.source / GENERATION, self.out)


def plan_conversion(
    path_or_hub_id: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: Target,
    dtype: DTypeLike | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Looks at a checkpoint's config and headers, and reads no weights.

    Args:
        path_or_hub_id: a folder of either form, or the name of a repository on the hub.
        out: the folder to write.
        dtype: float32, bfloat16 or float16; by default the one that the weights are stored in.
        overwrite: whether `out` may hold something; its weights will be removed, of either form.

    Raises:
        CheckpointError: there is none, or its config or headers cannot be read.
        UnsupportedModelError: config.json asks for a computation that is not implemented.
        ValueError: another form or dtype than those accepted; `out` is a file, the source, or not empty.
    """
    if to not in get_args(Target):
        raise ValueError(f"{to!r} is no form of checkpoints; accepted: {', '.join(get_args(Target))}")
    check_dtype(dtype)
    target = Path(out).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise ValueError(f"{out} is a file; accepted is a folder")
    if not overwrite and target.exists() and any(target.iterdir()):
        raise ValueError(f"{out} is not empty; overwrite=True (--overwrite) replaces the weights that it holds")
    source = locate(path_or_hub_id)
    if target == source.resolve():
        raise ValueError(f"{out} is what is to be converted; accepted is another folder")
    form = form_of(source)
    if form == "cache":
        raise CheckpointError(source, ["it holds a cache; accepted are folders of weights"])
    config = read_config(source)
    if form is None:
        raise CheckpointError(source, [no_weights(source)])
    parameters, stored = read_headers(source, config)
    held = jnp.dtype(dtype or jnp.result_type(*stored))
    sizes = [math.prod(shape) * held.itemsize for shape in Blank.of(config).shapes.values()]
    beside = {"hf": 2 * max(sizes), "orbax": transfer_bytes(sizes)}
    return Conversion(
        source=source,
        form=form,
        out=target,
        to=to,
        dtype=held,
        parameters=parameters,
        parameter_bytes=sum(sizes),
        peak_bytes=PROCESS + sum(sizes) + max(beside[form], beside[to]),
    )

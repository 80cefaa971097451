"""Converts checkpoints to another form or dtype, and plans the memory of a conversion."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.folder import Form, check_dtype, check_form, locate, owned
from kvjax.checkpoint.hf import load, read_headers, write_hf
from kvjax.checkpoint.orbax import restore, stored_arrays, transfer_bytes, write_orbax
from kvjax.checkpoint.parameters import Blank
from kvjax.checkpoint.source import Source, source_of
from kvjax.checkpoint.tensors import no_weights, unties
from kvjax.checkpoint.tokenizer_files import copy_tokenizer
from kvjax.checks import did_you_mean, path_of, shown
from kvjax.files.writing import check_folder, new_folder
from kvjax.models import DecoderConfig

Target = Literal["hf", "orbax"]
PROCESS = 300_000_000  # bytes of Python, JAX and a tokenizer
ARGUMENT = "overwrite=True (--overwrite)"


@dataclass(frozen=True)
class Conversion:
    """A planned conversion; `run` performs it.

    Attributes:
        source: the folder or GGUF file of the checkpoint.
        form: the form of the checkpoint, `hf`, `gguf` or `orbax`.
        out: the folder to write.
        to: the form to write.
        dtype: the dtype of the weights to write.
        parameters: the number of parameters.
        parameter_bytes: the size of the parameters in `dtype`, in bytes.
        peak_bytes: an estimate of the peak host memory in bytes: all parameters, and a few tensors in transfer.
        overwrite: whether `out` may hold files.
    """

    source: Path
    form: Form
    out: Path
    to: Target
    dtype: np.dtype
    parameters: int
    parameter_bytes: int
    peak_bytes: int
    overwrite: bool = False

    def run(self) -> None:
        """Converts the checkpoint on the CPU. `out` changes only when everything is written.

        Raises:
            CheckpointError: the checkpoint cannot be read.
            ValueError: `out` is not empty any more and `overwrite` is False, a folder has the name of a file to write,
                or another process is writing `out`.
            OSError: the folder or a file cannot be written.
        """
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            files = "own" if self.form == "gguf" else None  # the files of a folder's tokenizer are copied
            if self.form == "orbax":
                params, tokenizer = restore(self.source, self.dtype, tokenizer=files)
            else:
                params, tokenizer = load(self.source, self.dtype, tokenizer=files)
            with new_folder(
                self.out, owned(tokenizer=True), "config.json", overwrite=self.overwrite, argument=ARGUMENT
            ) as folder:
                if self.to == "hf":
                    write_hf(params, folder, tokenizer)
                else:
                    write_orbax(params, folder, tokenizer)
                if files is None and jax.process_index() == 0:
                    copy_tokenizer(self.source, folder)


def plan_conversion(
    path_or_hub_id: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: Target,
    dtype: DTypeLike | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Plans the conversion of a checkpoint from its config and headers, without reading weights.

    If the config ties the embeddings and the checkpoint has an output matrix as well, these two are compared.

    Args:
        path_or_hub_id: a folder of either form, a GGUF file, or a hub id.
        out: the folder to write.
        to: the form to write, `hf` or `orbax`.
        dtype: the dtype of the weights to write: float32, bfloat16 or float16. By default the stored dtype.
        overwrite: whether `out` may hold files. The files of its checkpoint, in either form, will be replaced or
            removed; all other files stay.

    Raises:
        CheckpointError: there is no such checkpoint, or its config or headers cannot be read.
        UnsupportedModelError: the config asks for a computation that is not implemented.
        ValueError: `to` or `dtype` is not accepted, or `out` is a file, the source, or a folder that is not empty while
            `overwrite` is False.
    """
    if to not in get_args(Target):
        raise ValueError(
            f"to={shown(to)}: expected one of {', '.join(get_args(Target))}{did_you_mean(to, get_args(Target))}"
        )
    check_dtype(dtype)
    target = path_of("out", out).resolve()
    check_folder(target, overwrite, ARGUMENT)
    source = locate(path_or_hub_id)
    if target == source.resolve():
        raise ValueError(f"{out} is what is to be converted: expected another folder")
    form = check_form(source, "hf", "gguf", "orbax")
    opened = source_of(source)
    config = opened.config()
    if form is None:
        raise CheckpointError(source, [no_weights(source)])
    converted = jnp.dtype(dtype or read_headers(opened).dtype)
    numbers = list(map(math.prod, Blank.of(_as_read(opened, form, config)).shapes.values()))
    sizes = [number * converted.itemsize for number in numbers]
    transfer = {"hf": 2 * max(sizes), "gguf": 2 * max(sizes), "orbax": transfer_bytes(sizes)}
    return Conversion(
        source=source,
        form=form,
        out=target,
        to=to,
        dtype=converted,
        parameters=sum(numbers),
        parameter_bytes=sum(sizes),
        peak_bytes=PROCESS + sum(sizes) + max(transfer[form], transfer[to]),
        overwrite=overwrite,
    )


def _as_read(source: Source, form: Form, config: DecoderConfig) -> DecoderConfig:
    """The config of the decoder that `load` or `restore` returns, which may have an output matrix of its own."""
    problems: list[str] = []
    with ExitStack() as stack:
        if form == "orbax":
            untied = "unembed" in stored_arrays(source.path, problems)
        else:
            tensors, _ = source.open(stack, problems)
            untied = unties(tensors, config, source.weights)
    if problems:
        raise CheckpointError(source.path, problems)
    return replace(config, tie_embeddings=config.tie_embeddings and not untied)

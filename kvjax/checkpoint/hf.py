"""Hugging Face checkpoints, read and written: config.json, safetensors, tokenizer.

The families of `kvjax.models` say what tensors are called and how they are laid out.
"""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax.checkpoint.folder import (
    DTYPES,
    CheckpointError,
    check_dtype,
    check_form,
    form_of,
    locate,
    read_config,
    read_json,
    read_tokenizer,
    remove_weights,
    together,
    write_config,
)
from kvjax.checkpoint.parameters import Blank, Progress, by_path, from_slices
from kvjax.checkpoint.tensors import DERIVED, Tensor, compare, files_of, open_tensors, write_file, write_index
from kvjax.models import Decoder, DecoderConfig, by_tensor, family, hf_shapes
from kvjax.sharding import fetch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load(
    path_or_hub_id: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> tuple[Decoder, PreTrainedTokenizerBase | None]:
    """Reads a decoder and its tokenizer from a folder in Hugging Face form, or from the Hugging Face hub.

    Weights are `model.safetensors`, or the files that `model.safetensors.index.json` names. They go to their devices
    slice by slice: a host holds one slice of one tensor beside the parameters, and reads what its own devices hold.
    RoPE frequencies in a checkpoint are ignored, since they follow from the config. An `lm_head.weight` beside tied
    embeddings must equal them.

    Args:
        path_or_hub_id: an existing folder, or else a hub id such as `mistralai/Mistral-7B-v0.3`.
        dtype: float32, bfloat16 or float16, which all weights are cast to. By default the one they are stored in;
            where they are stored in several, the smallest that represents them all.
        mesh: of `make_mesh`, to spread the parameters over; by default they go to the default device.
        progress: called after each parameter with the bytes loaded and the bytes of all.

    Returns:
        The decoder, a pytree with its `DecoderConfig` as `params.config`, and the tokenizer, None if there is none.

    Raises:
        CheckpointError: the checkpoint is absent, incomplete, corrupt or not in safetensors; lists all problems.
        UnsupportedModelError: config.json asks for a computation that is not implemented; names the field.
        ValueError: `dtype` is not one of those accepted, or `mesh` does not fit the model.
    """
    check_dtype(dtype)
    folder = locate(path_or_hub_id)
    check_form(folder, "hf")
    config = read_config(folder)
    blank = Blank.of(config, mesh)
    problems: list[str] = []
    tokenizer = read_tokenizer(folder, problems)
    with ExitStack() as stack:
        tensors, lost = open_tensors(folder, stack, problems)
        problems += compare(tensors, lost, config, blank.shapes)
        if problems:
            raise CheckpointError(folder, problems)
        table = family(config.family).weights(config)
        if dtype is None:
            headers = (tensors[weight.name].get_slice(weight.name) for weight in table)
            dtype = jnp.result_type(*{DTYPES[header.get_dtype()] for header in headers})
        arrays: dict[str, jax.Array] = {}
        done, total = 0, sum(map(math.prod, blank.shapes.values())) * jnp.dtype(dtype).itemsize
        for weight in table:
            shape, tensor = blank.shapes[weight.path], tensors[weight.name].get_slice(weight.name)
            read = partial(weight.read, tensor, shape, dtype=dtype)
            arrays[weight.path] = from_slices(shape, blank.sharding(weight.path), read)
            done += arrays[weight.path].nbytes
            if progress is not None:
                progress(done, total)
    return blank.filled(arrays), tokenizer


def save_hf(
    params: Decoder,
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> None:
    """Writes config.json, safetensors and the tokenizer's files to a folder that `load` and transformers read.

    The folder is made where it does not exist; weights that it held are removed. Weights keep their dtype, and may be
    spread over a mesh: they are gathered one tensor at a time. With several processes all take part, and the first one
    writes.

    Args:
        max_shard_bytes: weights of more bytes are written as several files with an index, none of which is larger
            unless by a single tensor.
        progress: called after each tensor with the bytes written and the bytes of all.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes}; accepted is a positive number")
    folder, arrays = Path(path).expanduser(), by_path(params)
    held = by_tensor(family(params.config.family).weights(params.config))
    shapes = hf_shapes(
        (weight for weights in held.values() for weight in weights), {p: a.shape for p, a in arrays.items()}
    )
    tensors = [
        Tensor(name, shapes[name], jnp.result_type(*(arrays[weight.path].dtype for weight in weights)))
        for name, weights in held.items()
    ]
    total, done = sum(tensor.nbytes for tensor in tensors), 0

    def read(tensor: Tensor) -> np.ndarray:
        nonlocal done
        whole = np.empty(tensor.shape, tensor.dtype)
        for weight in held[tensor.name]:
            weight.write(fetch(arrays[weight.path]), whole)
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
        return whole

    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        remove_weights(folder)
        files = files_of(tensors, max_shard_bytes)
        for name, content in files.items():
            write_file(folder / name, content, read)
        write_index(folder, files)
        write_config(folder, params.config, params.embed.dtype, tokenizer)
    else:
        for tensor in tensors:
            read(tensor)
    together(f"kvjax.save_hf {folder}")


def read_headers(folder: Path, config: DecoderConfig) -> tuple[int, tuple[str, ...]]:
    """The number of parameters and the dtypes they are stored in, from the safetensors headers alone.

    A folder without safetensors, as one has before downloading them, is taken at its config's word. RoPE frequencies,
    which follow from the config, do not count. Raises CheckpointError.
    """
    if form_of(folder) != "hf":
        hf = read_json(folder / "config.json")
        named = str(hf.get("dtype") or hf.get("torch_dtype") or "float32")
        if named not in map(str, DTYPES.values()):
            raise CheckpointError(folder, [f"config.json says dtype {named}; accepted: {_accepted()}"])
        return sum(map(math.prod, Blank.of(config).shapes.values())), (named,)
    problems: list[str] = []
    with ExitStack() as stack:
        tensors, _ = open_tensors(folder, stack, problems)
        headers = [file.get_slice(name) for name, file in tensors.items() if not DERIVED.search(name)]
        dtypes = sorted({header.get_dtype() for header in headers})
        problems += [f"tensor(s) of dtype {dtype}; accepted: {_accepted()}" for dtype in dtypes if dtype not in DTYPES]
        if problems:
            raise CheckpointError(folder, problems)
        return sum(math.prod(header.get_shape()) for header in headers), tuple(str(DTYPES[dtype]) for dtype in dtypes)


def _accepted() -> str:
    return ", ".join(map(str, DTYPES.values()))

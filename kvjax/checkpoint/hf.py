"""Reads Hugging Face checkpoints and GGUF files, and writes the former: config.json, safetensors and the tokenizer.

The families of `kvjax.models` define the names and layouts of the tensors.
"""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax.checkpoint.card import write_said
from kvjax.checkpoint.errors import CheckpointError, listed
from kvjax.checkpoint.folder import (
    DTYPE_NAMES,
    DTYPES,
    check_dtype,
    check_form,
    form_of,
    locate,
    owned,
    read_text_config,
)
from kvjax.checkpoint.parameters import Blank, Progress, all_finite, by_path, from_slices
from kvjax.checkpoint.source import Source, source_of
from kvjax.checkpoint.tensors import (
    DERIVED,
    TensorSpec,
    compare,
    files_of,
    matrices,
    model_dtype,
    parameter_dtypes,
    unties,
    warn_untied,
    write_file,
    write_index,
)
from kvjax.checkpoint.tokenizer_files import OWN, check_given, write_tokenizer
from kvjax.checks import check_params, check_saved, is_integer, shown
from kvjax.files.writing import new_folder
from kvjax.mesh.sharding import fetch
from kvjax.models import Card, Decoder, by_parameter, by_tensor, family, hf_shapes, read_parameter
from kvjax.runtime.modes import own_modes
from kvjax.runtime.progress import tell

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD_BYTES = 5_000_000_000  # the largest size of a file


@own_modes()
def load(
    path_or_hub_id: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    tokenizer: Any = OWN,
) -> tuple[Decoder, PreTrainedTokenizerBase | None]:
    """Loads a decoder and its tokenizer from a folder in Hugging Face form, a GGUF file, or the Hugging Face hub.

    A folder has the weights in `model.safetensors`, or in the files that `model.safetensors.index.json` names. A GGUF
    file has config and tokenizer in its metadata, and needs the extra `gguf`. The weights are placed slice by slice:
    each host reads the slices of its own devices, and holds one slice of one tensor beyond the parameters. RoPE
    frequencies in a checkpoint are ignored, because the config determines them. If the config ties the embeddings and
    the checkpoint has another output matrix as well, as fine-tunes may have, both are loaded with a warning.

    `params.card` has what the checkpoint says beside its weights: its end tokens, which end the answers of all
    functions, the tokens that these never have, and its sampler, which is the default of the commands alone. A warning
    names what else it asks for, which kvjax does not apply.

    Args:
        path_or_hub_id: an existing folder or GGUF file, or else "demo", the model that ships with kvjax, or a hub id
            such as `mistralai/Mistral-7B-v0.3`.
        dtype: the dtype that all weights are cast to: float32, bfloat16 or float16. By default the stored dtype; if
            several are stored, the smallest that represents them all. Vectors that the decoder converts to float32
            anyway, as all of Qwen3.5, do not count, and keep a stored float32. Quantised weights are float32.
        mesh: a mesh of `make_mesh` to shard the parameters over. By default they are placed on the default device.
        progress: a callback that receives, after each parameter, the number of bytes loaded and the total.
        tokenizer: "own" reads the checkpoint's, None reads none, and a tokenizer is returned as it is. If the
            checkpoint's own cannot be read, a warning says why, and the result is None.

    Returns:
        The decoder, a pytree with its `DecoderConfig` in `params.config`, and the tokenizer, or None if there is none.

    Raises:
        CheckpointError: the checkpoint is absent, incomplete, corrupt or in another form, or a weight is NaN or
            infinite in `dtype`. It lists all problems.
        UnsupportedModelError: the config asks for a computation that is not implemented. It names the field.
        ValueError: `dtype` or `tokenizer` is not accepted, or `mesh` does not fit the model.
    """
    check_dtype(dtype)
    check_given(tokenizer)
    path = locate(path_or_hub_id)
    check_form(path, "hf", "gguf")
    source = source_of(path)
    config = source.config()
    card = source.card()
    warn_ignored(path, card)
    problems: list[str] = []
    with ExitStack() as stack:
        tensors, unreadable = source.open(stack, problems)
        if unties(tensors, config, source.weights):
            embed, unembed = matrices(config, source.weights)
            warn_untied(path, unembed, embed)
            config = dataclasses.replace(config, tie_embeddings=False)
        blank = Blank.of(config, mesh)
        problems += compare(tensors, unreadable, config, blank.shapes, source.weights, source.described)
        if problems:
            raise CheckpointError(path, problems)
        tokenizer = tokenizer_or_warning(source, tokenizer)
        table = source.weights(config)
        dtypes = parameter_dtypes(tensors, table, dtype)
        arrays: dict[str, jax.Array] = {}
        finite: dict[str, jax.Array] = {}
        shapes = blank.shapes
        done, total = 0, sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
        tell("loading the weights", done, total, "bytes")
        for name, weights in by_parameter(table).items():
            read = partial(read_parameter, weights, tensors, shapes[name], dtype=dtypes[name])
            arrays[name] = from_slices(shapes[name], blank.sharding(name), read)
            finite[weights[0].name] = all_finite(arrays[name])
            done += arrays[name].nbytes
            tell("loading the weights", done, total, "bytes")
            if progress is not None:
                progress(done, total)
    check_finite(path, finite, dtypes["embed"])
    return blank.filled(arrays, card), tokenizer


def tokenizer_or_warning(source: Source, given: Any) -> Any:
    """Returns the tokenizer that `load` returns. Warns its caller if the checkpoint's own cannot be read."""
    if not isinstance(given, str):
        return given
    problems: list[str] = []
    own = source.tokenizer(problems)
    for problem in problems:
        warnings.warn(
            f"{source.path}: {problem}; the weights are loaded without a tokenizer, and tokenizer= takes another one",
            stacklevel=4,  # the caller of `load` or `restore`, which `own_modes` wraps
        )
    return own


def warn_ignored(path: Path, card: Card) -> None:
    """Warns the caller of `load` or `restore` of what a checkpoint asks for and kvjax does not apply."""
    if card.ignored:
        warnings.warn(
            f"{path} asks for {', '.join(card.ignored)} when text is generated, which kvjax does not apply",
            stacklevel=4,  # the caller of `load` or `restore`, which `own_modes` wraps
        )


def check_finite(path: Path, finite: Mapping[str, jax.Array], dtype: DTypeLike) -> None:
    """Raises CheckpointError that names the tensors with NaN or infinity."""
    found = [name for name, good in finite.items() if not bool(good)]
    if found:
        raise CheckpointError(path, [f"NaN or infinity as {jnp.dtype(dtype).name} in tensor(s): {listed(found)}"])


@own_modes()
def save_hf(
    params: Decoder,
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> None:
    """Writes config.json, safetensors and the tokenizer's files to a folder that `load` and transformers read.

    What the checkpoint said in config.json and generation_config.json is written back (`params.card`), and a tokenizer
    that is as its folder has it keeps the files of that folder.

    The folder changes only when everything is written, so that an error or a kill leaves it as it was. The weights keep
    their dtype. Weights that are sharded over a mesh are gathered one tensor at a time. With several processes, all of
    them must call this function; the first one writes.

    Args:
        params: the decoder.
        path: an empty or absent folder.
        tokenizer: the tokenizer to write; None writes none.
        max_shard_bytes: the largest size of a file in bytes, >= 1. Larger weights are split into several files with an
            index. A tensor that is larger than this has a file of its own.
        progress: a callback that receives, after each tensor, the number of bytes written and the total.
        overwrite: whether the folder may hold files. Its weights, in either form, and its config are then replaced, and
            so is its tokenizer if one is given. All other files stay.

    Raises:
        ValueError: `max_shard_bytes` is below 1, the folder is not empty and `overwrite` is False, a folder has the
            name of a file to write, or another process is writing the folder.
        OSError: the folder or a file cannot be written.
    """
    check_params(params)
    check_saved(tokenizer)
    if not is_integer(max_shard_bytes) or max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={shown(max_shard_bytes)}: expected an integer >= 1")
    with new_folder(path, owned(tokenizer is not None), "config.json", overwrite=overwrite) as folder:
        write_hf(params, folder, tokenizer, max_shard_bytes, progress)


def write_hf(
    params: Decoder,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Creates a folder and writes a checkpoint into it. The arguments are those of `save_hf`."""
    arrays = by_path(params)
    table = family(params.config.family).weights(params.config)
    shapes = hf_shapes(table, {path: array.shape for path, array in arrays.items()})
    parts = by_tensor(table)
    tensors = [
        TensorSpec(name, shapes[name], jnp.result_type(*(arrays[weight.path].dtype for weight in weights)))
        for name, weights in parts.items()
    ]
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    tell("writing the weights", done, total, "bytes")

    def gather(tensor: TensorSpec) -> np.ndarray:
        nonlocal done
        content = np.empty(tensor.shape, tensor.dtype)
        for weight in parts[tensor.name]:
            array = arrays[weight.path]
            held = (
                array if weight.expert is None else jax.lax.dynamic_index_in_dim(array, weight.expert, keepdims=False)
            )
            weight.write(fetch(held), content)
        done += tensor.nbytes
        tell("writing the weights", done, total, "bytes")
        if progress is not None:
            progress(done, total)
        return content

    if jax.process_index() == 0:
        folder.mkdir()
        files = files_of(tensors, max_shard_bytes)
        for name, content in files.items():
            write_file(folder / name, content, gather)
        write_index(folder, files)
        write_said(folder, params, tokenizer)
        if tokenizer is not None:
            write_tokenizer(folder, tokenizer)
    else:
        for tensor in tensors:
            gather(tensor)


class Headers(NamedTuple):
    """The facts of a checkpoint's parameters that the headers of its files have.

    Attributes:
        parameters: their number.
        stored: the names of their dtypes.
        dtype: the dtype of the model that `load` returns by default.
    """

    parameters: int
    stored: tuple[str, ...]
    dtype: np.dtype


def read_headers(source: Source) -> Headers:
    """Reads the headers of a checkpoint's files, without its weights.

    For a folder without safetensors, such as one before the weights are downloaded, both come from config.json. RoPE
    frequencies do not count, because the config determines them.

    Raises:
        CheckpointError: a file is unreadable, or a dtype is not float32, bfloat16 or float16.
    """
    if form_of(source.path) not in ("hf", "gguf"):
        hf = read_text_config(source.path)
        named = str(hf.get("dtype") or hf.get("torch_dtype") or "float32")
        if named not in map(str, DTYPES.values()):
            raise CheckpointError(source.path, [f"config.json has dtype={shown(named)}; accepted: {DTYPE_NAMES}"])
        parameters = sum(map(math.prod, Blank.of(source.config()).shapes.values()))
        return Headers(parameters, (named,), jnp.dtype(named))
    problems: list[str] = []
    with ExitStack() as stack:
        opened, _ = source.open(stack, problems)
        tensors = [tensor for name, tensor in opened.items() if not DERIVED.search(name)]
        dtypes = sorted({tensor.get_dtype() for tensor in tensors})
        problems += [f"tensor(s) of dtype {dtype}; accepted: {DTYPE_NAMES}" for dtype in dtypes if dtype not in DTYPES]
        if problems:
            raise CheckpointError(source.path, problems)
        parameters = sum(math.prod(tensor.get_shape()) for tensor in tensors)
        stored = tuple(str(DTYPES[dtype]) for dtype in dtypes)
        return Headers(parameters, stored, model_dtype(opened, source.weights(source.config())))

"""Reads and writes checkpoints through Orbax.

Such a folder holds the arrays in `params/`, config.json and the tokenizer's files.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kvjax.checkpoint.card import read_card, write_said
from kvjax.checkpoint.errors import CheckpointError, listed, one_line, orbax_writes
from kvjax.checkpoint.folder import (
    DTYPE_NAMES,
    DTYPES,
    PARAMS,
    check_dtype,
    check_form,
    owned,
    read_config,
)
from kvjax.checkpoint.hf import check_finite, tokenizer_or_warning, warn_ignored
from kvjax.checkpoint.parameters import Blank, all_finite, by_path
from kvjax.checkpoint.source import Folder
from kvjax.checkpoint.tensors import warn_untied
from kvjax.checkpoint.tokenizer_files import OWN, check_given, write_tokenizer
from kvjax.checks import check_params, check_saved, path_of
from kvjax.files.writing import new_folder
from kvjax.models import Decoder
from kvjax.runtime.modes import own_modes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@own_modes()
def save(
    params: Decoder,
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
) -> None:
    """Writes parameters, config and tokenizer to a folder that `restore` reads.

    The folder changes only when everything is written, so that an error or a kill leaves it as it was. With several
    processes, all of them must call this function; each writes the parts that its own devices hold.

    Args:
        params: the decoder.
        path: an empty or absent folder. With several processes, all of them must be able to access it.
        tokenizer: the tokenizer to write; None writes none.
        overwrite: whether the folder may hold files. Its weights, in either form, and its config are then replaced, and
            so is its tokenizer if one is given. All other files stay.

    Raises:
        ValueError: the folder is not empty and `overwrite` is False, a folder has the name of a file to write, or
            another process is writing the folder.
        OSError: the folder or a file cannot be written.
    """
    check_params(params)
    check_saved(tokenizer)
    with new_folder(path, owned(tokenizer is not None), "config.json", overwrite=overwrite) as folder:
        write_orbax(params, folder, tokenizer)


def write_orbax(params: Decoder, folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Creates a folder and writes a checkpoint into it. The arguments are those of `save`."""
    arrays = by_path(params)
    handler = _handler([array.nbytes for array in arrays.values()])
    with orbax_writes(), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder / PARAMS, args=ocp.args.PyTreeSave(arrays))
    if jax.process_index() == 0:
        write_said(folder, params, tokenizer)
        if tokenizer is not None:
            write_tokenizer(folder, tokenizer)


@own_modes()
def restore(
    path: str | os.PathLike[str], dtype: DTypeLike | None = None, mesh: Mesh | None = None, tokenizer: Any = OWN
) -> tuple[Decoder, PreTrainedTokenizerBase | None]:
    """Loads a decoder and its tokenizer from a folder that `save` wrote.

    With several processes, each reads the parts that its own devices hold.

    Args:
        path: the folder.
        dtype: the dtype that all weights are cast to: float32, bfloat16 or float16. By default they keep their own.
        mesh: a mesh of `make_mesh` to shard the parameters over; it may differ from the mesh that they were saved
            from. By default they are placed on the default device.
        tokenizer: "own", None or a tokenizer, as in `load`.

    Returns:
        The decoder and its tokenizer, or None if there is none, as `load` returns them.

    Raises:
        CheckpointError: the folder is absent, incomplete, corrupt or not written by `save`. It lists all problems.
        UnsupportedModelError: config.json asks for a computation that is not implemented. It names the field.
        ValueError: `dtype` or `tokenizer` is not accepted, or `mesh` does not fit the model.
    """
    check_dtype(dtype)
    check_given(tokenizer)
    folder = path_of("path", path).resolve()
    check_form(folder, "orbax")
    if not folder.is_dir():
        raise CheckpointError(folder, ["no such folder"])
    config = read_config(folder)
    card = read_card(folder, config.vocab_size)
    warn_ignored(folder, card)
    problems: list[str] = []
    stored = stored_arrays(folder, problems)
    if config.tie_embeddings and "unembed" in stored:
        warn_untied(folder, "unembed", "embed")
        config = dataclasses.replace(config, tie_embeddings=False)
    blank = Blank.of(config, mesh)
    problems += _compare(stored, blank.shapes) if stored else []
    if problems:
        raise CheckpointError(folder, problems)
    tokenizer = tokenizer_or_warning(Folder(folder), tokenizer)
    device = jnp.zeros(()).sharding
    wanted = {
        path: jax.ShapeDtypeStruct(shape, dtype or stored[path].dtype, sharding=blank.sharding(path) or device)
        for path, shape in blank.shapes.items()
    }
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in stored.values()]
    arguments = ocp.args.PyTreeRestore(wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted))
    try:
        with ocp.Checkpointer(_handler(sizes)) as checkpointer:
            arrays = checkpointer.restore(folder / PARAMS, args=arguments)
    except (ValueError, OSError) as error:
        raise CheckpointError(folder, [f"its arrays in {PARAMS}/ cannot be read: {one_line(error)}"]) from error
    finite = {path: all_finite(array) for path, array in arrays.items()}
    check_finite(folder, finite, jnp.result_type(*(array.dtype for array in arrays.values())))
    return blank.filled(arrays, card), tokenizer


def transfer_bytes(sizes: Sequence[int]) -> int:
    """Returns the peak host memory, in bytes, that saving or restoring takes beyond the arrays.

    It consists of the data that has been copied from the devices and the data that is being written. Orbax limits each
    of the two separately, and to the same number of bytes.

    Args:
        sizes: the sizes of the arrays in bytes.
    """
    return 2 * min(_gigabytes(sizes) * 10**9, sum(sizes))


def _gigabytes(sizes: Sequence[int]) -> int:
    """Returns the memory limit for Orbax: the size of the largest array, rounded up to whole GB.

    With its default limit Orbax may hold all arrays at once.
    """
    return math.ceil(max(sizes) / 10**9)


def _handler(sizes: Sequence[int]) -> Any:
    """Returns an Orbax handler with limited memory, for arrays of these sizes in bytes."""
    gigabytes = _gigabytes(sizes)
    return ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=gigabytes, save_device_host_concurrent_gb=gigabytes, restore_concurrent_gb=gigabytes
    )


def stored_arrays(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Returns the shape and dtype of each stored array by path. Appends to `problems` if they cannot be read."""
    if not (folder / PARAMS).is_dir():
        problems.append(f"it has no {PARAMS}/, which kvjax.save writes")
        return {}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata((folder / PARAMS).absolute()).item_metadata
    except (ValueError, OSError) as error:
        problems.append(f"{PARAMS}/ is damaged: {one_line(error)}")
        return {}
    if tree is None:
        problems.append(f"{PARAMS}/ is not a complete Orbax checkpoint")
        return {}
    return dict(tree.tree)


def _compare(stored: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Returns the problems of the arrays: missing or unexpected ones, and wrong shapes or dtypes."""
    problems = []
    for kind, names in (("missing", shapes.keys() - stored.keys()), ("unexpected", stored.keys() - shapes.keys())):
        if names:
            problems.append(f"{kind} array(s): {listed(sorted(names))}")
    for path in sorted(shapes.keys() & stored.keys()):
        shape, dtype = tuple(stored[path].shape), jnp.dtype(stored[path].dtype)
        if shape != shapes[path]:
            problems.append(f"{path} has shape {shape}; config.json asks for {shapes[path]}")
        if dtype not in DTYPES.values():
            problems.append(f"{path} has dtype {dtype}; accepted: {DTYPE_NAMES}")
    return problems

"""Checkpoints through Orbax: a folder with the arrays in `params/`, beside config.json and the tokenizer's files."""

from __future__ import annotations

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

from kvjax.checkpoint.folder import (
    DTYPES,
    PARAMS,
    CheckpointError,
    check_dtype,
    check_form,
    first_line,
    read_config,
    read_tokenizer,
    remove_weights,
    together,
    write_config,
)
from kvjax.checkpoint.parameters import Blank, by_path
from kvjax.models import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def save(
    params: Decoder,
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
) -> None:
    """Writes parameters, config and tokenizer to a folder that `restore` reads, each process its own devices' parts.

    Args:
        path: a folder that is empty or does not exist; with several processes one that all of them reach.
        overwrite: whether it may hold something; its weights are then removed, of either form.

    Raises:
        ValueError: the folder is not empty.
    """
    folder = Path(path).expanduser().resolve()
    if not overwrite and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; accepted is a folder that is, or does not exist, or overwrite=True")
    together(f"kvjax.save into {folder}")
    arrays = by_path(params)
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        remove_weights(folder)
    together(f"kvjax.save may write {folder}")
    with ocp.Checkpointer(_handler([array.nbytes for array in arrays.values()])) as checkpointer:
        checkpointer.save(folder / PARAMS, args=ocp.args.PyTreeSave(arrays))
    if jax.process_index() == 0:
        write_config(folder, params.config, params.embed.dtype, tokenizer)
    together(f"kvjax.save wrote {folder}")


def restore(
    path: str | os.PathLike[str], dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> tuple[Decoder, PreTrainedTokenizerBase | None]:
    """Reads what `save` wrote, each process its own devices' parts.

    Args:
        dtype: float32, bfloat16 or float16, which all weights are cast to; by default they keep their own.
        mesh: of `make_mesh`, to spread the parameters over, whatever they were spread over before; by default they go
            to the default device.

    Returns:
        The decoder and its tokenizer, None if there is none, as of `load`.

    Raises:
        CheckpointError: the folder is absent, incomplete, corrupt or not of `save`; lists all problems.
        ValueError: `dtype` is not one of those accepted, or `mesh` does not fit the model.
    """
    check_dtype(dtype)
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise CheckpointError(folder, ["no such folder"])
    check_form(folder, "orbax")
    config = read_config(folder)
    blank = Blank.of(config, mesh)
    problems: list[str] = []
    tokenizer = read_tokenizer(folder, problems)
    stored = _stored(folder, problems)
    problems += _compare(stored, blank.shapes) if stored else []
    if problems:
        raise CheckpointError(folder, problems)
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
        raise CheckpointError(folder, [f"its arrays in {PARAMS}/ cannot be read: {first_line(error)}"]) from error
    return blank.filled(arrays), tokenizer


def transfer_bytes(sizes: Sequence[int]) -> int:
    """The most host memory that saving or restoring takes beside the arrays, of these sizes in bytes.

    What has been copied from the devices, and what is being written: either up to the limit that Orbax is given.
    """
    return 2 * min(_gigabytes(sizes) * 10**9, sum(sizes))


def _gigabytes(sizes: Sequence[int]) -> int:
    """One, or what the largest array takes. Orbax's own default is all arrays at once."""
    return math.ceil(max(sizes) / 10**9)


def _handler(sizes: Sequence[int]) -> Any:
    gigabytes = _gigabytes(sizes)
    return ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=gigabytes, save_device_host_concurrent_gb=gigabytes, restore_concurrent_gb=gigabytes
    )


def _stored(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Shape and dtype of each array, by path."""
    if not (folder / PARAMS).is_dir():
        problems.append(f"it has no {PARAMS}/, which kvjax.save writes")
        return {}
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(folder / PARAMS).item_metadata
    except (ValueError, OSError) as error:
        problems.append(f"{PARAMS}/ is damaged: {first_line(error)}")
        return {}
    if tree is None:
        problems.append(f"{PARAMS}/ is no complete Orbax checkpoint")
        return {}
    return dict(tree.tree)


def _compare(stored: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with the arrays: missing, unexpected, misshapen, of another dtype."""
    problems = []
    for kind, names in (("missing", shapes.keys() - stored.keys()), ("unexpected", stored.keys() - shapes.keys())):
        if names:
            problems.append(f"{kind} array(s): {', '.join(sorted(names))}")
    for path in sorted(shapes.keys() & stored.keys()):
        shape, dtype = tuple(stored[path].shape), jnp.dtype(stored[path].dtype)
        if shape != shapes[path]:
            problems.append(f"{path} has shape {shape}; config.json asks for {shapes[path]}")
        if dtype not in DTYPES.values():
            problems.append(f"{path} has dtype {dtype}; accepted: {', '.join(map(str, DTYPES.values()))}")
    return problems

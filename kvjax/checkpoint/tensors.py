"""Opens and writes safetensors files, one tensor at a time, and checks the tensors of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from kvjax.checkpoint.errors import MOST, CheckpointError, listed, one_line
from kvjax.checkpoint.folder import DTYPES, INDEX, PICKLES, WEIGHTS, read_json, unfetched
from kvjax.checks import shown
from kvjax.models import DecoderConfig, Weight, hf_shapes

# The RoPE frequencies that old checkpoints store. The config determines them.
DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


class Stored(Protocol):
    """A tensor of a checkpoint, which is read by slices."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str:
        """The name of its dtype: a key of DTYPES, or one that is not accepted."""

    def __getitem__(self, index: Any, /) -> np.ndarray: ...


def open_tensors(folder: Path, stack: ExitStack, problems: list[str]) -> tuple[dict[str, Stored], set[str] | None]:
    """Opens the checkpoint's files and reads their headers. Appends a sentence to `problems` for each fault.

    Args:
        folder: the checkpoint.
        stack: closes the files.
        problems: the list to append to.

    Returns:
        The tensors by name, and the names of the unreadable tensors. A tensor is
        unreadable if the index places it in a file that cannot be opened or does not hold it; `problems` covers these
        tensors already. None means that any tensor may be unreadable, because no index names them.
    """
    if (folder / WEIGHTS).is_file():
        file = _open_file(folder, WEIGHTS, stack, problems)
        return ({}, None) if file is None else ({name: file.get_slice(name) for name in list(file.keys())}, set())
    if not (folder / INDEX).is_file():
        problems.append(no_weights(folder))
        return {}, None
    tensors: dict[str, Stored] = {}
    unreadable: set[str] = set()
    for name, placed in sorted(_read_index(folder).items()):
        file = _open_file(folder, name, stack, problems)
        if file is None:
            unreadable |= placed
            continue
        names = set(file.keys())
        duplicates, absent = sorted(tensors.keys() & names), sorted(placed - names)
        if duplicates:
            problems.append(f"tensor(s) in more than one file: {listed(duplicates)}")
        if absent:
            problems.append(f"{INDEX} places tensor(s) in {name} that it does not hold: {listed(absent)}")
        tensors |= {name: file.get_slice(name) for name in names}
        unreadable |= set(absent)
    return tensors, unreadable


def _read_index(folder: Path) -> dict[str, set[str]]:
    """Returns the tensor names that the index places in each file. Raises CheckpointError."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(folder, [f"{INDEX} lacks a weight_map from tensor names to file names"])
    files: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        files.setdefault(file, set()).add(tensor)
    return files


def _open_file(folder: Path, name: str, stack: ExitStack, problems: list[str]) -> safe_open | None:
    """Opens one file of the folder; on failure appends the reason to `problems` and returns None."""
    if Path(name).name != name:
        problems.append(f"{INDEX} names {shown(name)}, which is not a file name of this folder")
    elif not (folder / name).is_file():
        problems.append(f"{INDEX} names {name}, which does not exist")
    else:
        try:
            if pointer := unfetched(folder / name):
                problems.append(pointer)
                return None
            return stack.enter_context(safe_open(folder / name, framework="numpy"))
        except (SafetensorError, OSError) as error:
            problems.append(f"{name} is truncated or not a safetensors file: {one_line(error)}")
    return None


def no_weights(folder: Path) -> str:
    """Returns the reason why a folder has no weights to read."""
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        return (
            f"its weights are pickled ({', '.join(pickles)}), and unpickling a file runs any code that it contains; "
            "kvjax reads safetensors only: convert the weights with transformers' save_pretrained"
        )
    return f"it has neither {WEIGHTS} nor {INDEX}: expected weights in safetensors"


def compare(
    tensors: Mapping[str, Stored],
    unreadable: set[str] | None,
    config: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
    weights: Callable[[DecoderConfig], list[Weight]],
    described: str,
) -> list[str]:
    """Compares the tensors with the config, and returns one sentence per problem.

    The problems are missing and unexpected tensors, and wrong shapes and dtypes. The first MOST of each are named.

    Args:
        tensors: the tensors by name, from `open_tensors`.
        unreadable: the tensors that are not reported as missing, from `open_tensors`; None for all.
        config: the decoder's config.
        shapes: the shape of each parameter by path.
        weights: returns the weights of a config under the names that the checkpoint uses.
        described: what describes the model, such as config.json.
    """
    problems = []
    expected = hf_shapes(weights(config), shapes)
    missing = [] if unreadable is None else [name for name in expected if name not in tensors.keys() | unreadable]
    if missing:
        problems.append(f"missing tensor(s): {listed(missing)}")
    embed, unembed = matrices(config, weights)
    if unembed in missing and embed in tensors:
        problems.append(
            f"{described} does not tie the output matrix to the embeddings: expected {unembed}, or "
            "tie_word_embeddings=true if it is the embedding matrix"
        )
    expected[unembed] = expected[embed]  # a checkpoint may store the output matrix although it is tied
    wrong = []
    for name in (name for name in expected if name in tensors):
        shape, dtype = tuple(tensors[name].get_shape()), tensors[name].get_dtype()
        if shape != expected[name]:
            wrong.append(f"{name} has shape {shape}; {described} asks for {expected[name]}")
        if dtype not in DTYPES:
            wrong.append(f"{name} has dtype {dtype}; accepted: {', '.join(DTYPES)}")
    problems += wrong[:MOST]
    if len(wrong) > MOST:
        problems.append(f"{len(wrong) - MOST:,} more such shapes and dtypes")
    unexpected = sorted(name for name in tensors.keys() - expected.keys() if not DERIVED.search(name))
    if unexpected:
        problems.append(f"unexpected tensor(s): {listed(unexpected)}")
    return problems


def model_dtype(tensors: Mapping[str, Stored], table: list[Weight]) -> np.dtype:
    """Returns the smallest dtype that represents all tensors but those of wide parameters."""
    wide = {weight.name for weight in table if weight.wide}
    held = {tensor.get_dtype() for name, tensor in tensors.items() if name not in wide and not DERIVED.search(name)}
    return jnp.result_type(*(DTYPES[dtype] for dtype in held))


def parameter_dtypes(
    tensors: Mapping[str, Stored], table: list[Weight], dtype: DTypeLike | None
) -> dict[str, np.dtype]:
    """Returns the dtype of each parameter by path: `dtype`, or by default `model_dtype` with wide ones as stored."""
    if dtype is not None:
        return {weight.path: jnp.dtype(dtype) for weight in table}
    model = model_dtype(tensors, table)
    return {
        weight.path: jnp.result_type(model, DTYPES[tensors[weight.name].get_dtype()]) if weight.wide else model
        for weight in table
    }


def matrices(config: DecoderConfig, weights: Callable[[DecoderConfig], list[Weight]]) -> tuple[str, str]:
    """The names of the embedding matrix and of the output matrix, whether or not the config ties them."""
    names = {weight.path: weight.name for weight in weights(dataclasses.replace(config, tie_embeddings=False))}
    return names["embed"], names["unembed"]


def unties(
    tensors: Mapping[str, Stored], config: DecoderConfig, weights: Callable[[DecoderConfig], list[Weight]]
) -> bool:
    """Returns whether the config ties an output matrix that is not the embeddings.

    A fine-tune that trained both has such a matrix, and often the config of its base. The two are read only if the
    checkpoint has both.
    """
    embed, unembed = matrices(config, weights)
    if not (config.tie_embeddings and {embed, unembed} <= tensors.keys()):
        return False
    pair = [tensors[name] for name in (embed, unembed)]
    shapes = {tuple(tensor.get_shape()) for tensor in pair}
    readable = all(tensor.get_dtype() in DTYPES for tensor in pair)
    return len(shapes) == 1 and readable and not _equal(*pair)


def warn_untied(path: Path, unembed: str, embed: str) -> None:
    """Warns the caller of `load` or `restore`."""
    warnings.warn(
        f"{path}: {unembed} differs from {embed}, but config.json ties them (tie_word_embeddings); both are loaded, "
        "and the model is not tied",
        stacklevel=4,  # the caller of `load` or `restore`, which `own_modes` wraps
    )


def _equal(one: Stored, other: Stored) -> bool:
    """Returns whether two tensors of the same shape are equal. It reads 4,096 rows at a time."""
    length, rows = one.get_shape()[0], 4096
    blocks = [slice(start, min(start + rows, length)) for start in range(0, length, rows)]
    return all(np.array_equal(one[block], other[block]) for block in blocks)


@dataclass(frozen=True)
class TensorSpec:
    """The name, shape and dtype of a tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def files_of(tensors: list[TensorSpec], max_bytes: int) -> dict[str, list[TensorSpec]]:
    """Distributes tensors over files in their order, and returns the tensors of each file by the file's name.

    A file holds at most `max_bytes` bytes of tensors, or a single tensor.
    """
    files: list[list[TensorSpec]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(other.nbytes for other in files[-1]) + tensor.nbytes > max_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": file for i, file in enumerate(files, 1)}


def write_index(folder: Path, files: Mapping[str, list[TensorSpec]]) -> None:
    """Writes the index if there are several files."""
    if len(files) > 1:
        size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
        placed = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(file: Path, tensors: list[TensorSpec], read: Callable[[TensorSpec], np.ndarray]) -> None:
    """Writes one file, and holds one tensor at a time. The `save_file` of safetensors needs all tensors at once.

    The format is: the header's length in 8 bytes, the header in JSON, padded with spaces to a multiple of 8 bytes, and
    the tensors' bytes.

    Args:
        file: the file to write.
        tensors: the tensors in their order in the file.
        read: returns the content of a tensor.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires this field
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": names[tensor.dtype], "shape": tensor.shape, "data_offsets": (start, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            out.write(read(tensor).reshape(-1).view(np.uint8).data)

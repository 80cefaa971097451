"""Files of safetensors: opened and compared with what a config asks for, and written a tensor at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from kvjax.checkpoint.folder import DTYPES, INDEX, PICKLES, WEIGHTS, CheckpointError, first_line, read_json
from kvjax.models import DecoderConfig, family, hf_shapes

# RoPE's frequencies, which old checkpoints carry: they follow from the config.
DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def open_tensors(folder: Path, stack: ExitStack, problems: list[str]) -> tuple[dict[str, safe_open], set[str] | None]:
    """Opens the checkpoint's files, reading their headers only.

    Returns the open file of each tensor, and the names of those that are known to be lost, in a file that cannot be
    opened for one: None for all others that there may be. What is wrong joins the problems.
    """
    placed: dict[str, str] | None = None
    if (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    elif (folder / INDEX).is_file():
        placed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
            raise CheckpointError(folder, [f"{INDEX} lacks a weight_map from tensor names to file names"])
        files = sorted(set(placed.values()))
    else:
        problems.append(no_weights(folder))
        return {}, None
    tensors: dict[str, safe_open] = {}
    lost: set[str] = set()
    for name in files:
        listed = {tensor for tensor, file in (placed or {}).items() if file == name}
        if Path(name).name != name:
            problem = f"{INDEX} names {name!r}, which is not a file name of this folder"
        elif not (folder / name).is_file():
            problem = f"{INDEX} names {name}, which does not exist"
        else:
            try:
                file = stack.enter_context(safe_open(folder / name, framework="numpy"))
            except (SafetensorError, OSError) as error:
                problem = f"{name} is truncated or no safetensors file: {first_line(error)}"
            else:
                twice = sorted(tensors.keys() & set(file.keys()))
                if twice:
                    problems.append(f"tensor(s) in more than one file: {', '.join(twice)}")
                tensors |= dict.fromkeys(file.keys(), file)
                absent = listed - set(file.keys())
                if absent:
                    problems.append(f"{INDEX} places in {name} what it does not hold: {', '.join(sorted(absent))}")
                    lost |= absent
                continue
        problems.append(problem)
        if placed is None:
            return tensors, None
        lost |= listed
    return tensors, lost


def no_weights(folder: Path) -> str:
    """Why a folder has no weights to read."""
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        return (
            f"its weights are pickled ({', '.join(pickles)}), and unpickling a file runs whatever code it holds; "
            "only safetensors are read: convert it with transformers' save_pretrained"
        )
    return f"it has neither {WEIGHTS} nor {INDEX}"


def compare(
    tensors: Mapping[str, safe_open],
    lost: set[str] | None,
    config: DecoderConfig,
    shapes: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """What is wrong with the tensors: missing, misshapen, of another dtype, unexpected, untied against the config."""
    problems = []
    kind = family(config.family)
    expected = hf_shapes(kind.weights(config), shapes)
    missing = [] if lost is None else [name for name in expected if name not in tensors.keys() | lost]
    if missing:
        problems.append(f"missing tensor(s): {', '.join(missing)}")
    untied = {weight.path: weight.name for weight in kind.weights(dataclasses.replace(config, tie_embeddings=False))}
    embed, unembed = untied["embed"], untied["unembed"]
    expected[unembed] = expected[embed]  # may stand beside tied embeddings too
    sound = set()
    for name in (name for name in expected if name in tensors):
        header = tensors[name].get_slice(name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if shape != expected[name]:
            problems.append(f"{name} has shape {shape}; config.json asks for {expected[name]}")
        if dtype not in DTYPES:
            problems.append(f"{name} has dtype {dtype}; accepted: {', '.join(DTYPES)}")
        if shape == expected[name] and dtype in DTYPES:
            sound.add(name)
    if config.tie_embeddings and {embed, unembed} <= sound and not _equal(tensors, embed, unembed):
        problems.append(f"{unembed} differs from {embed}, but config.json ties them (tie_word_embeddings)")
    unexpected = sorted(name for name in tensors.keys() - expected.keys() if not DERIVED.search(name))
    if unexpected:
        problems.append(f"unexpected tensor(s): {', '.join(unexpected)}")
    return problems


def _equal(tensors: Mapping[str, safe_open], first: str, second: str, rows: int = 4096) -> bool:
    """Whether two tensors of one shape are equal, read a few rows at a time."""
    one, other = (tensors[name].get_slice(name) for name in (first, second))
    length = one.get_shape()[0]
    blocks = [slice(start, min(start + rows, length)) for start in range(0, length, rows)]
    return all(np.array_equal(one[block], other[block]) for block in blocks)


@dataclass(frozen=True)
class Tensor:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def files_of(tensors: list[Tensor], max_bytes: int) -> dict[str, list[Tensor]]:
    """The files, by name, that hold the tensors in their order; none larger than that unless by a single tensor."""
    files: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(other.nbytes for other in files[-1]) + tensor.nbytes > max_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": file for i, file in enumerate(files, 1)}


def write_index(folder: Path, files: Mapping[str, list[Tensor]]) -> None:
    """Writes the index, which a single file does without."""
    if len(files) > 1:
        size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
        placed = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": size}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(file: Path, tensors: list[Tensor], read: Callable[[Tensor], np.ndarray]) -> None:
    """Writes one file, asking for one tensor at a time: safetensors' own `save_file` takes all at once.

    The format: the header's length in 8 bytes, the header in JSON, padded with spaces to a multiple of 8, the numbers.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers wants to be told the layout
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

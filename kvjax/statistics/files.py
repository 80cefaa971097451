"""Files of statistics: a folder with model.safetensors and a card, README.md; or a file of TriAttention's authors.

model.safetensors has some of `STATISTICS`. torch.save wrote the authors' files: `stats` has, for each query head under
the name `layerLL_headHH`, the mean query as complex numbers, one per pair of channels, and the mean norm of each pair.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors.numpy import save_file

from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.folder import BESIDE, DTYPES, WEIGHTS, locate
from kvjax.checkpoint.tensors import open_tensors
from kvjax.checkpoint.torch_files import locate_file, read_torch
from kvjax.files.writing import new_folder

from .forms import STATISTICS

CARD = "README.md"
FILES = (WEIGHTS, CARD)
OWNED = re.compile("|".join(map(re.escape, FILES)))
HEAD = re.compile(r"layer(\d{2,4})_head(\d{2,4})")
PARTS = ("q_mean_real", "q_mean_imag", "q_abs_mean")


def holds_statistics(path_or_hub_id: str | os.PathLike[str]) -> bool:
    """Returns whether a folder or a file, or one on the hub, has statistics.

    Raises:
        CheckpointError: there is no such folder, file or repository.
    """
    file = locate_file(path_or_hub_id)
    if file is not None:
        content = read_torch(file)
        return isinstance(content, dict) and "stats" in content
    with ExitStack() as stack:
        stored, _ = open_tensors(locate(path_or_hub_id, FILES, BESIDE), stack, [])
        return not STATISTICS.keys().isdisjoint(stored)


def read_statistics(path_or_hub_id: str | os.PathLike[str]) -> dict[str, Float[np.ndarray, "L *rest"]]:
    """Reads statistics from a folder or a file, or from the hub.

    Args:
        path_or_hub_id: a folder, or a repository on the hub such as `nthngdy/Llama-3.1-8B_qfilt`; or a file that ends
            in .pt, such as `qwen3_8b.pt` of TriAttention's authors.

    Returns:
        Float32 arrays by name.

    Raises:
        CheckpointError: the statistics are absent or not finite, or there are other tensors. It lists all problems.
    """
    file = locate_file(path_or_hub_id)
    if file is not None:
        return _finite(file, _of_file(file))
    folder = locate(path_or_hub_id, FILES, BESIDE)
    problems: list[str] = []
    with ExitStack() as stack:
        stored, _ = open_tensors(folder, stack, problems)
        if not problems and not stored:
            problems.append(f"{WEIGHTS} has no tensors: expected some of {', '.join(STATISTICS)}")
        if others := sorted(stored.keys() - STATISTICS.keys()):
            problems.append(f"unexpected tensor(s): {', '.join(others)}; expected some of {', '.join(STATISTICS)}")
        for name in sorted(stored.keys() & STATISTICS.keys()):
            if stored[name].get_dtype() not in DTYPES:
                problems.append(f"{name} has dtype {stored[name].get_dtype()}: expected {', '.join(DTYPES)}")
        if problems:
            raise CheckpointError(folder, problems)
        found = {name: np.asarray(tensor[...]).astype(np.float32) for name, tensor in stored.items()}
    return _finite(folder, found)


def _of_file(file: Path) -> dict[str, Float[np.ndarray, "L *rest"]]:
    """The statistics of a file of TriAttention's authors."""
    content = read_torch(file)
    stats, facts = (content.get(name) if isinstance(content, dict) else None for name in ("stats", "metadata"))
    if not isinstance(stats, dict) or not isinstance(facts, dict):
        raise CheckpointError(file, ["it has no dictionaries 'stats' and 'metadata', as files of TriAttention have"])
    if facts.get("rope_style") != "half":
        raise CheckpointError(file, ["its rope_style is not 'half', which pairs channel i with channel i + D / 2"])
    heads = {tuple(map(int, at.groups())): stats[name] for name in stats if (at := HEAD.fullmatch(str(name)))}
    L, H = (1 + max((at[axis] for at in heads), default=-1) for axis in (0, 1))
    if not len(stats) == len(heads) == L * H > 0:
        reason = f"'stats' has {len(stats)} entries of {L} layers and {H} heads: expected a layerLL_headHH of each"
        raise CheckpointError(file, [reason])
    parts = [head.get(part) if isinstance(head, dict) else None for _, head in sorted(heads.items()) for part in PARTS]
    shapes = {part.shape if isinstance(part, np.ndarray) else () for part in parts}
    if len(shapes) != 1 or len(*shapes) != 1:
        raise CheckpointError(file, [f"a head lacks one of {', '.join(PARTS)}, or their sizes differ"])
    real, imaginary, norms = np.moveaxis(np.array(parts, np.float32).reshape(L, H, 3, -1), 2, 0)
    return {"query_mean": np.concatenate([real, imaginary], axis=-1), "query_norms": norms}


def _finite(source: Path, found: dict[str, Float[np.ndarray, "L *rest"]]) -> dict[str, Float[np.ndarray, "L *rest"]]:
    """The same statistics. Raises CheckpointError for numbers that are not finite."""
    if broken := [name for name, statistic in found.items() if not np.isfinite(statistic).all()]:
        raise CheckpointError(source, [f"{name} has numbers that are not finite" for name in broken])
    return found


def write_statistics(
    statistics: Mapping[str, Float[np.ndarray, "L *rest"]],
    path: str | os.PathLike[str],
    *,
    facts: Mapping[str, Any],
    overwrite: bool = False,
) -> None:
    """Writes statistics to a folder that `read_statistics` reads.

    Args:
        statistics: float32 arrays by name.
        path: an empty or absent folder.
        facts: how they were measured, for the card: a value by name.
        overwrite: whether the folder may hold files; those of statistics are then replaced.

    Raises:
        ValueError: the folder is not empty and `overwrite` is False.
        OSError: the folder or a file cannot be written.
    """
    shapes = {name: " x ".join(map(str, statistic.shape)) for name, statistic in statistics.items()}
    rows = [f"| {name} | {value} |" for name, value in {**facts, **shapes}.items()]
    head = "---\nlibrary_name: kvjax\ntags: [kv-cache]\n---\n\n# Statistics of queries\n\n"
    with new_folder(path, OWNED, WEIGHTS, overwrite=overwrite) as folder:
        folder.mkdir()
        save_file({name: np.ascontiguousarray(statistic) for name, statistic in statistics.items()}, folder / WEIGHTS)
        (folder / CARD).write_text(head + "\n".join(["| | |", "|---|---|", *rows]) + "\n", encoding="utf-8")

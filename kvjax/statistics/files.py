"""Files of statistics: a folder with model.safetensors, which has some of `STATISTICS`, and a card, README.md."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors.numpy import save_file

from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.folder import DTYPES, WEIGHTS, locate
from kvjax.checkpoint.tensors import open_tensors
from kvjax.writing import new_folder

from .forms import STATISTICS

CARD = "README.md"
FILES = (WEIGHTS, CARD)
OWNED = re.compile("|".join(map(re.escape, FILES)))


def holds_statistics(path_or_hub_id: str | os.PathLike[str]) -> bool:
    """Whether a folder, or a repository on the hub, has tensors with the names of statistics.

    Raises:
        CheckpointError: there is no such folder or repository.
    """
    with ExitStack() as stack:
        stored, _ = open_tensors(locate(path_or_hub_id, FILES), stack, [])
        return not STATISTICS.keys().isdisjoint(stored)


def read_statistics(path_or_hub_id: str | os.PathLike[str]) -> dict[str, Float[np.ndarray, "L *rest"]]:
    """Reads statistics from a folder, or from a repository on the hub such as `nthngdy/Llama-3.1-8B_qfilt`.

    Args:
        path_or_hub_id: the folder or repository.

    Returns:
        Float32 arrays by name.

    Raises:
        CheckpointError: the statistics are absent or not finite, or there are other tensors. It lists all problems.
    """
    folder = locate(path_or_hub_id, FILES)
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
    if broken := [name for name, statistic in found.items() if not np.isfinite(statistic).all()]:
        raise CheckpointError(folder, [f"{name} has numbers that are not finite" for name in broken])
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

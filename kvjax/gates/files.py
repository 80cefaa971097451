"""Files of gates: a folder with config.json, model.safetensors and a card, README.md.

config.json has `model_type`, the method; `n_modules`, the number of layers; and the sizes of the method's tensors. The
tensor NAME of layer i is called `layers.i.NAME`. The gates that the authors of KVzap published have this form.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.folder import DTYPES, locate, read_json
from kvjax.checkpoint.tensors import open_tensors
from kvjax.checks import is_integer
from kvjax.shown import shown
from kvjax.writing import new_folder

from .forms import FORMS, Form

FILES = ("config.json", "model.safetensors", "README.md")
OWNED = re.compile("|".join(map(re.escape, FILES)))


@dataclass(frozen=True)
class Gates:
    """Gates of all layers of a model.

    Attributes:
        method: a key of `FORMS`.
        sizes: what fixes the shapes, by the names of the method's form.
        layers: the tensors of each layer by name.
    """

    method: str
    sizes: Mapping[str, int | None]
    layers: tuple[Mapping[str, np.ndarray], ...]

    @property
    def form(self) -> Form:
        """What the method's gates are."""
        return FORMS[self.method]


def read_gates(path_or_hub_id: str | os.PathLike[str]) -> Gates:
    """Reads gates from a folder, or from a repository on the hub such as `nvidia/KVzap-mlp-Qwen3-8B`.

    Args:
        path_or_hub_id: the folder or repository.

    Raises:
        CheckpointError: the gates are absent, incomplete, of an unknown method or in another form. It lists all
            problems.
    """
    folder = locate(path_or_hub_id, FILES)
    if not (folder / FILES[0]).is_file():
        reason = f"it has no {FILES[0]}: expected a folder of gates, with {FILES[0]} and {FILES[1]}"
        raise CheckpointError(folder, [reason])
    config = read_json(folder / FILES[0])
    found = config.get("model_type")
    if found not in FORMS:
        raise CheckpointError(
            folder, [f"config.json has model_type={shown(found)}: expected gates of {', '.join(FORMS)}"]
        )
    form = FORMS[found]
    sizes = {name: config.get(name) for name in form.sizes}
    wrong = [
        f"config.json has {name}={shown(config.get(name))}: expected an integer >= 1"
        for name, optional in {"n_modules": False, **form.sizes}.items()
        if not ((is_integer(config.get(name)) and config[name] >= 1) or (optional and config.get(name) is None))
    ]
    if wrong:
        raise CheckpointError(folder, wrong)
    problems: list[str] = []
    shapes = {
        f"layers.{i}.{name}": shape for i in range(config["n_modules"]) for name, shape in form.shapes(sizes).items()
    }
    with ExitStack() as stack:
        stored, _ = open_tensors(folder, stack, problems)
        if not problems:
            if missing := sorted(shapes.keys() - stored.keys()):
                problems.append(f"missing tensor(s): {', '.join(missing)}")
            if others := sorted(stored.keys() - shapes.keys()):
                problems.append(f"unexpected tensor(s): {', '.join(others)}")
        for name in sorted(shapes.keys() & stored.keys()):
            tensor = stored[name]
            if tuple(tensor.get_shape()) != shapes[name]:
                problems.append(f"{name} has shape {tuple(tensor.get_shape())}: expected {shapes[name]}")
            if tensor.get_dtype() not in DTYPES:
                problems.append(f"{name} has dtype {tensor.get_dtype()}: expected {', '.join(DTYPES)}")
        if problems:
            raise CheckpointError(folder, problems)
        layers = tuple(
            {name: np.asarray(stored[f"layers.{i}.{name}"][...]) for name in form.shapes(sizes)}
            for i in range(config["n_modules"])
        )
    return Gates(found, sizes, layers)


def write_gates(
    gates: Gates, path: str | os.PathLike[str], *, facts: Mapping[str, Any], overwrite: bool = False
) -> None:
    """Writes gates to a folder that `read_gates` reads.

    Args:
        gates: the gates.
        path: an empty or absent folder.
        facts: how the gates were made, for the card: a value by name.
        overwrite: whether the folder may hold files; those of gates are then replaced.

    Raises:
        ValueError: the folder is not empty and `overwrite` is False.
        OSError: the folder or a file cannot be written.
    """
    config = {"model_type": gates.method, "n_modules": len(gates.layers), **gates.sizes}
    tensors = {
        f"layers.{i}.{name}": np.ascontiguousarray(tensor)
        for i, layer in enumerate(gates.layers)
        for name, tensor in layer.items()
    }
    with new_folder(path, OWNED, FILES[0], overwrite=overwrite) as folder:
        folder.mkdir()
        (folder / FILES[0]).write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, folder / FILES[1])
        (folder / FILES[2]).write_text(_card(gates, facts), encoding="utf-8")


def _card(gates: Gates, facts: Mapping[str, Any]) -> str:
    """The text of README.md."""
    numbers = sum(tensor.size for layer in gates.layers for tensor in layer.values())
    rows = {"method": gates.method, "layers": len(gates.layers), "parameters": f"{numbers:,}", **facts}
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    head = f"---\nlibrary_name: kvjax\ntags: [kv-cache, {gates.method}]\n---\n\n# Gates of {gates.method}\n\n"
    return head + "\n".join(["| | |", "|---|---|", *lines]) + "\n"

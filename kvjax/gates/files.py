"""Files of gates: a folder with config.json, model.safetensors and a card, README.md; or a file of Fast KVzip.

config.json has `model_type`, the method; `n_modules`, the number of layers; and the sizes of the method's tensors. The
tensor NAME of layer i is called `layers.i.NAME`. The gates that the authors of KVzap published have this form. Those of
Fast KVzip are in files of torch.save: `module` is a list of a dictionary of tensors per layer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from kvjax.checkpoint.errors import CheckpointError
from kvjax.checkpoint.folder import BESIDE, DTYPES, locate, read_json
from kvjax.checkpoint.tensors import open_tensors
from kvjax.checkpoint.torch_files import locate_file, read_torch
from kvjax.checks import is_integer, shown
from kvjax.files.writing import new_folder

from .forms import FORMS, Form, Shapes

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
        """The form of the method's gates."""
        return FORMS[self.method]


def read_gates(path_or_hub_id: str | os.PathLike[str]) -> Gates:
    """Reads gates from a folder or a file, or from the hub.

    Args:
        path_or_hub_id: a folder or a repository on the hub, such as `nvidia/KVzap-mlp-Qwen3-8B`; or a file that ends in
            .pt, or one of a repository, such as `Jang-Hyun/Fast-KVzip/qwen3-8b/q4_dim16_sink16.pt`.

    Raises:
        CheckpointError: the gates are absent, incomplete, of an unknown method or in another form. It lists all
            problems.
    """
    file = locate_file(path_or_hub_id)
    if file is not None:
        return _of_file(file)
    folder = locate(path_or_hub_id, FILES, BESIDE)
    if not (folder / FILES[0]).is_file():
        reason = f"it has no {FILES[0]}: expected a folder of gates, with {FILES[0]} and {FILES[1]}"
        raise CheckpointError(folder, [reason])
    config = read_json(folder / FILES[0])
    found = config.get("model_type")
    if not isinstance(found, str) or found not in FORMS:
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
    with ExitStack() as stack:
        stored, _ = open_tensors(folder, stack, problems)
        if problems:
            raise CheckpointError(folder, problems)
        given = {name: (tuple(tensor.get_shape()), tensor.get_dtype()) for name, tensor in stored.items()}
        if config["n_modules"] > len(stored):  # a layer has at least one
            reason = f"config.json has n_modules={shown(config['n_modules'])}, and there are {len(stored)} tensors"
            raise CheckpointError(folder, [f"{reason}: expected the number of layers"])
        shapes = [form.shapes_of(i, sizes) for i in range(config["n_modules"])]
        _check(folder, shapes, given)
        layers = tuple(
            {name: np.asarray(stored[f"layers.{i}.{name}"][...]) for name in own} for i, own in enumerate(shapes)
        )
    return Gates(found, sizes, layers)


def _of_file(file: Path) -> Gates:
    """The gates of a file of Fast KVzip's authors, whose sizes follow from the tensors of the first layer."""
    content = read_torch(file)
    modules = content.get("module") if isinstance(content, dict) else None
    if not isinstance(modules, list) or not modules or not all(isinstance(layer, dict) for layer in modules):
        raise CheckpointError(file, ["it has no list 'module' of a dictionary per layer, as files of Fast KVzip have"])
    layers = tuple({name: x for name, x in layer.items() if isinstance(x, np.ndarray)} for layer in modules)
    try:
        H, _, S, C = layers[0]["k_base"].shape
        (*_, G), (*_, E) = (layers[0][name].shape for name in ("b", "q_proj.weight"))
    except (KeyError, ValueError):
        reason = "its first layer lacks k_base [H, 1, S, C], b [H, 1, G] or q_proj.weight [H * G * C, E]"
        raise CheckpointError(file, [reason]) from None
    sizes: dict[str, int | None] = {"input_dim": E, "nhead": H, "ngroup": G, "output_dim": C, "sink": S}
    if not all(sizes.values()):
        raise CheckpointError(file, [f"its gates have the sizes {shown(sizes)}: expected integers >= 1"])
    names = {dtype: name for name, dtype in DTYPES.items()}
    given = {
        f"layers.{i}.{name}": (tensor.shape, names.get(tensor.dtype, str(tensor.dtype)))
        for i, layer in enumerate(layers)
        for name, tensor in layer.items()
    }
    _check(file, [FORMS["fastkvzip"].shapes(sizes)] * len(layers), given)
    return Gates("fastkvzip", sizes, layers)


def _check(source: Path, shapes: Sequence[Shapes], given: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """Raises CheckpointError unless the shapes, of each layer, and the dtypes are those that are given."""
    expected = {f"layers.{i}.{name}": shape for i, own in enumerate(shapes) for name, shape in own.items()}
    problems = []
    if missing := sorted(expected.keys() - given.keys()):
        problems.append(f"missing tensor(s): {', '.join(missing)}")
    if others := sorted(given.keys() - expected.keys()):
        problems.append(f"unexpected tensor(s): {', '.join(others)}")
    for name in sorted(expected.keys() & given.keys()):
        shape, dtype = given[name]
        if shape != expected[name]:
            problems.append(f"{name} has shape {shape}: expected {expected[name]}")
        if dtype not in DTYPES:
            problems.append(f"{name} has dtype {dtype}: expected {', '.join(DTYPES)}")
    if problems:
        raise CheckpointError(source, problems)


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

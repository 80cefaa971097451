"""A number for each head of a model, measured on it before: from a file or a tuple, and entries in proportion to it."""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.checks import path_of, shown
from kvjax.files.reading import read_text

HeadNumbers: TypeAlias = tuple[tuple[float, ...], ...]  # by layer and head

DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError),  # of the archive, and of JSON's depth
    *(LookupError, TypeError, ValueError, ArithmeticError),  # of what it holds
)
DEMO = Path(__file__).parents[2] / "demo_model" / "gates" / "duo_attention"


def read_numbers(name: str, path: str | Path) -> HeadNumbers:
    """Returns the numbers of a file: a row per layer.

    Args:
        name: of the option.
        path: a .json or .npz file that has the rows under `name`, a .tsv file, or a folder of gates that
            `kvjax train-gates --method duo_attention` wrote. A .json file may also have an entry "layer-head" for each
            head, a number or a list of numbers, of which the mean is taken.

    Raises:
        ValueError: for a file or a folder that has no such numbers.
    """
    path = path_of(name, path)
    try:
        if not path.exists():
            raise ValueError("there is no such file or folder")
        if path.is_dir():
            rows = _of_folder(path)
        elif path.suffix == ".json":
            found = json.loads(read_text(path))
            if not isinstance(found, dict):
                raise ValueError("it is no JSON object")
            rows = found[name] if name in found else _by_name(found)
        elif path.suffix == ".npz":
            with np.load(path) as arrays:
                rows = arrays[name].tolist()
        elif path.suffix == ".tsv":
            rows = np.loadtxt(read_text(path).splitlines(), delimiter="\t", ndmin=2).tolist()
        else:
            raise ValueError("unknown ending")
        return tuple(tuple(float(number) for number in row) for row in rows)
    except DAMAGE as error:
        raise ValueError(
            f"{name}={shown(str(path))} cannot be read ({error}): expected a .json or .npz file with {name!r}, a "
            ".tsv file, with a row per layer, or a folder of gates"
        ) from error


def _of_folder(path: Path) -> list[list[float]]:
    from kvjax.checkpoint.errors import CheckpointError  # policies exist before what reads checkpoints
    from kvjax.gates.files import read_gates

    try:
        gates = read_gates(path)
    except CheckpointError as error:
        raise ValueError("; ".join(error.problems)) from error
    if gates.form.attached:
        kind = "networks" if gates.form.score is not None else "learned tokens"
        raise ValueError(f"its gates of {gates.method} are {kind}")
    return [layer["gates"].tolist() for layer in gates.layers]


def _by_name(found: dict[str, Any]) -> list[list[float]]:
    """Returns a row per layer from {"layer-head": number or numbers}."""
    numbers: dict[int, dict[int, float]] = {}
    for name, value in found.items():
        layer, head = map(int, name.split("-"))
        numbers.setdefault(layer, {})[head] = float(np.mean(value))
    return [[numbers[layer][head] for head in range(len(numbers[layer]))] for layer in range(len(numbers))]


def head_numbers(name: str, given: str | HeadNumbers) -> HeadNumbers:
    """Returns the numbers of an option: a file, a folder, a tuple per layer, or "demo" for the demo model's gates.

    Raises:
        ValueError: for another value, or a file that has none.
    """
    numbers = given
    if isinstance(given, str):
        numbers = read_numbers(name, DEMO if given == "demo" else given)
    if not _are_rows(numbers):
        raise ValueError(
            f"{name}={shown(numbers)}: expected the name of a file, or a tuple per layer of equally many numbers"
        )
    assert not isinstance(numbers, str)
    return numbers


def _are_rows(numbers: Any) -> bool:
    """Returns whether a value is a tuple of equally long tuples of finite numbers."""
    if not isinstance(numbers, tuple) or not all(isinstance(layer, tuple) for layer in numbers):
        return False
    try:
        array = np.array(numbers)
    except ValueError:  # rows of several lengths
        return False
    return array.ndim == 2 and array.size > 0 and array.dtype.kind in "biuf" and bool(np.isfinite(array).all())


def check_groups(groups: int, heads: int) -> None:
    """Raises ValueError unless so many groups have equally many of the heads."""
    if heads % groups:
        raise ValueError(f"groups={groups} of {heads} kv heads: expected a divisor of {heads}")


def check_shape(name: str, numbers: tuple[tuple[Any, ...], ...], layers: int, kv_heads: int, expected: str) -> None:
    """Raises ValueError unless there is a number for each layer and kv head of a model."""
    ours = len(numbers), len(numbers[0])
    if ours != (layers, kv_heads):
        raise ValueError(
            f"{name} of {ours[0]} layers with {ours[1]} kv heads for a model of {layers} with {kv_heads}: expected "
            f"{expected}"
        )


def check_proportions(name: str, numbers: HeadNumbers, groups: int) -> None:
    """Raises ValueError unless there is a number >= 0 for each kv head of each layer, and in each group one above 0."""
    rows = head_numbers(name, numbers)
    check_groups(groups, len(rows[0]))
    if np.min(rows) < 0 or not np.all(np.sum(_by_group(rows, groups), axis=(0, 2))):
        raise ValueError(f"{name}={shown(rows)}: expected numbers >= 0, and one above 0 in each of {groups} groups")


def proportions(numbers: HeadNumbers, groups: int) -> Float[np.ndarray, "L H"]:
    """Returns the numbers on the scale on which the mean of each group, over all layers, is 1."""
    own = _by_group(numbers, groups)
    return (own / np.mean(own, axis=(0, 2), keepdims=True)).reshape(len(numbers), -1)


def apportioned(shares: Float[Array, "L H"], totals: Int[Array, "B"], groups: int) -> Int[Array, "L B H"]:
    """Divides each group's total among its heads of all layers in proportion to the shares, by largest remainders.

    Of equal remainders the earlier layer's and head's is rounded up. Nothing is summed but integers, so that groups on
    devices of their own give the same.

    Args:
        shares: of this device's kv heads, as `proportions` returns them.
        totals: entries of all heads of a group, for each row.
        groups: the number of groups of consecutive kv heads on this device.
    """
    L, H = shares.shape
    own = jnp.moveaxis(shares.reshape(L, groups, H // groups), 1, 0).reshape(groups, -1)
    mean, rest = jnp.divmod(totals, own.shape[1])
    wanted = own * (mean + rest / own.shape[1])[:, None, None]
    given = jnp.floor(wanted).astype(jnp.int32)
    left = totals[:, None] - jnp.sum(given, axis=-1)
    rank = jnp.argsort(jnp.argsort(given - wanted, axis=-1, stable=True), axis=-1)
    given += rank < left[..., None]
    return jnp.moveaxis(given.reshape(len(totals), groups, L, -1), 2, 0).reshape(L, len(totals), H)


def _by_group(numbers: HeadNumbers, groups: int) -> Float[np.ndarray, "L groups heads"]:
    return np.array(numbers, float).reshape(len(numbers), groups, -1)

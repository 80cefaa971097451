"""Tensors of a file that torch.save wrote, read without torch and without unpickling.

The file is an uncompressed zip archive. data.pkl is a pickle of protocol 2; data/KEY has the bytes of a storage, a flat
array. The reader carries out the instructions that build containers and tensors. It refuses any other instruction, and
any name that is not in `NAMES`. It imports and calls nothing that a file names.
"""

from __future__ import annotations

import math
import os
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.checkpoint.errors import CheckpointError, one_line
from kvjax.checks import path_of, shown

ON_HUB = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/(.+)")
VALUES = {"EMPTY_TUPLE": (), "NONE": None, "NEWTRUE": True, "NEWFALSE": False}
ARGUMENTS = ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
DAMAGE = (
    *(zipfile.BadZipFile, EOFError, OSError, RuntimeError),  # of the archive
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, BufferError),  # of the pickle, its tensors
)


def locate_file(path_or_hub_id: str | os.PathLike[str]) -> Path | None:
    """Returns the file that torch.save wrote, or downloads it from the Hugging Face hub; None for other paths.

    Args:
        path_or_hub_id: a path, or OWNER/REPOSITORY/FILE on the hub. It ends in .pt if torch.save wrote it.

    Raises:
        CheckpointError: there is no such file.
    """
    file = path_of("path_or_hub_id", path_or_hub_id)
    if file.suffix != ".pt" or file.is_dir():
        return None
    if file.exists():
        return file
    on_hub = ON_HUB.fullmatch(path_or_hub_id) if isinstance(path_or_hub_id, str) else None
    if on_hub is None:
        raise CheckpointError(file, ["no such file"])
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(*on_hub.groups()))
    except (OSError, ValueError) as error:  # not found, gated, offline, not a legal id
        reason = f"no such file, and the Hugging Face hub did not provide it: {one_line(error)}"
        raise CheckpointError(path_or_hub_id, [reason]) from error


def read_torch(file: Path) -> Any:
    """Returns what torch.save wrote: dicts, lists, tuples, numbers, texts, and an array for each tensor and parameter.

    None stands for an array of NumPy, which is no tensor.

    Raises:
        CheckpointError: the file is damaged, or has anything else.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("the archive is compressed")
            if sum(member.file_size for member in members) > file.stat().st_size:
                raise ValueError("the archive is smaller than its members")
            names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+/data\.pkl", name)]
            if len(names) != 1:
                raise ValueError(f"the archive has {len(names)} members FOLDER/data.pkl: expected one")
            return _Pickle(archive, names[0].removesuffix("data.pkl")).content(archive.read(names[0]))
    except DAMAGE as error:
        raise CheckpointError(
            file, [f"it is not a file of tensors that torch.save wrote: {one_line(error)}"]
        ) from error


class _Pickle:
    """Carries out a pickle. Its methods raise `DAMAGE`.

    Args:
        archive: the archive of the pickle.
        folder: the folder of its storages.
    """

    def __init__(self, archive: zipfile.ZipFile, folder: str):
        self.archive, self.folder = archive, folder
        order = f"{folder}byteorder"  # older files have none
        self.order = ">" if order in archive.namelist() and archive.read(order) == b"big" else "<"
        self.storages: dict[tuple[str, np.dtype], np.ndarray] = {}

    def content(self, pickle: bytes) -> Any:
        """Returns the object that the pickle builds. A mark opens a stack of its own above those of `outer`."""
        stack: list[Any] = []
        outer: list[list[Any]] = []
        memo: dict[Any, Any] = {}
        for opcode, argument, _ in pickletools.genops(pickle):
            name, items = opcode.name, stack
            if name in ("TUPLE", "APPENDS", "SETITEMS"):
                stack = outer.pop()
            match name:
                case "PROTO":
                    pass
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_LIST":
                    stack.append([])
                case "MARK":
                    outer.append(stack)
                    stack = []
                case "TUPLE":
                    stack.append(tuple(items))
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    number = int(name[-1])
                    stack[-number:] = [tuple(stack[-number:])]
                case "APPEND":
                    item = stack.pop()
                    stack[-1].append(item)
                case "APPENDS":
                    stack[-1].extend(items)
                case "SETITEM":
                    value, key = stack.pop(), stack.pop()
                    stack[-1].update(_entries([key, value]))
                case "SETITEMS":
                    stack[-1].update(_entries(items))
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "GLOBAL":
                    named = str(argument).replace(" ", ".")
                    if named not in NAMES:
                        raise ValueError(f"it names {shown(named)}, which is no part of a tensor")
                    stack.append(NAMES[named])
                case "REDUCE":
                    arguments, function = stack.pop(), stack.pop()
                    stack.append(function(*arguments))
                case "BUILD":  # sets attributes of a dictionary or of an array of NumPy
                    stack.pop()
                case "BINPERSID":
                    stack.append(self.storage(stack.pop()))
                case "STOP":
                    return stack.pop()
                case _ if name in VALUES:
                    stack.append(VALUES[name])
                case _ if name in ARGUMENTS:
                    stack.append(argument)
                case _:
                    raise ValueError(f"it has the instruction {name}")

    def storage(self, identity: Any) -> np.ndarray:
        """The numbers of a storage."""
        match identity:
            case ("storage", np.dtype() as dtype, str(key), _, int(size)):
                if (key, dtype) not in self.storages:
                    data = self.archive.read(f"{self.folder}data/{key}")
                    if len(data) != size * dtype.itemsize:
                        raise ValueError(
                            f"storage {shown(key)} has {len(data)} bytes: expected {size * dtype.itemsize}"
                        )
                    bits = np.frombuffer(data, f"{self.order}u{dtype.itemsize}")
                    self.storages[key, dtype] = bits.astype(bits.dtype.newbyteorder("="), copy=False).view(dtype)
                return self.storages[key, dtype]
        raise ValueError("it refers to something that is not a storage")


def _entries(items: list[Any]) -> dict[int | str, Any]:
    """The entries of a dictionary from keys and values in turn."""
    keys, values = items[::2], items[1::2]
    if not all(isinstance(key, int | str) for key in keys):  # the hash of nested tuples can take exponential time
        raise ValueError("a dictionary has a key that is neither an integer nor a text")
    return dict(zip(keys, values, strict=True))


def _tensor(storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> np.ndarray:
    """A view of a storage, within its bounds; `offset` and `strides` count numbers."""
    if not all(isinstance(number, int) for number in (offset, *shape, *strides)):
        raise ValueError("a tensor has a shape, an offset or strides that are not integers")
    if math.prod(shape) > storage.size:  # strides of 0 can make any size
        raise ValueError(f"a tensor of shape {shown(shape)} does not fit into its storage of {storage.size} numbers")
    size = storage.itemsize
    return np.ndarray(shape, storage.dtype, storage, offset * size, [stride * size for stride in strides])


def _nothing(*_: Any) -> None:
    """An array of NumPy, or a part of one."""


NAMES = {
    "collections.OrderedDict": lambda: {},
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "_codecs.encode": _nothing,
    "numpy.dtype": _nothing,
    "numpy.ndarray": _nothing,
    **{
        f"numpy.{core}.multiarray.{name}": _nothing for core in ("core", "_core") for name in ("_reconstruct", "scalar")
    },
    "torch.DoubleStorage": jnp.dtype("float64"),
    "torch.FloatStorage": jnp.dtype("float32"),
    "torch.HalfStorage": jnp.dtype("float16"),
    "torch.BFloat16Storage": jnp.dtype("bfloat16"),
    "torch.LongStorage": jnp.dtype("int64"),
    "torch.IntStorage": jnp.dtype("int32"),
    "torch.ShortStorage": jnp.dtype("int16"),
    "torch.CharStorage": jnp.dtype("int8"),
    "torch.ByteStorage": jnp.dtype("uint8"),
    "torch.BoolStorage": jnp.dtype("bool"),
}

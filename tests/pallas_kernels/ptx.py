"""What a compiled GPU kernel is, from its PTX and NVIDIA's assembler: registers, spills, tensor cores."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from kvjax.targets import target

PRODUCTS = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma"}


@dataclass(frozen=True)
class Kernel:
    """One of a program.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread's registers that are stored to memory.
        products: the kinds of instructions for tensor cores: mma, wgmma, tcgen05.
    """

    name: str
    registers: int
    spilled: int
    products: tuple[str, ...]


def assembler() -> str:
    """The path of ptxas: the package's, else the machine's; skips the test where there is none."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        for path in Path(folder).glob("*/bin/ptxas"):
            return str(path)
    return shutil.which("ptxas") or pytest.skip("no ptxas: pip install 'kvjax[aot]'")


def accelerator(name: str) -> jax.Device:
    """The first device of a target; skips the test where its compiler is not installed."""
    try:
        return target(name).devices()[0]
    except ImportError as error:
        pytest.skip(str(error))


def compile_for(device: jax.Device, function: Callable[..., Any], shapes: Any, folder: Path) -> list[Kernel]:
    """The kernels written by hand of `function(**shapes)`, compiled for a device that need not be here.

    Args:
        shapes: (shape, dtype) of each argument by name, or of each array in it.
        folder: for what the compiler writes.
    """
    mesh = jax.sharding.Mesh(np.array([device]), ("one",))
    where = NamedSharding(mesh, jax.P())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(*x, sharding=where), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # where Pallas looks for the kind of a GPU, since jax 0.11
        lowered = jax.jit(function).lower(**arguments)
    lowered.compile(compiler_options={"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx|^llvm"})
    return [kernel for path in folder.glob("*.ptx") for kernel in read(path)]


def read(path: Path) -> list[Kernel]:
    text = path.read_text()
    if not re.search(r"\.entry \w+_kernel", text):
        return []
    (arch,) = re.findall(r"^\.target (\w+)", text, re.MULTILINE)
    run = subprocess.run(
        [assembler(), "-v", f"-arch={arch}", str(path), "-o", "/dev/null"], capture_output=True, text=True, check=True
    )
    properties = re.findall(
        r"Function properties for (\w+)\s+.*?(\d+) bytes spill stores.*?Used (\d+) registers", run.stderr, re.DOTALL
    )
    bodies = dict(re.findall(r"\.entry (\w+)\((.*?)(?=\.entry|\Z)", text, re.DOTALL))
    return [
        Kernel(
            name,
            int(registers),
            int(spilled),
            tuple(kind for kind, use in PRODUCTS.items() if use in bodies[name]),
        )
        for name, spilled, registers in properties
    ]

"""Facts of a compiled GPU kernel, from its PTX and NVIDIA's assembler: registers, spills, tensor cores."""

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

from benchmarks.aot.targets import target

PRODUCTS = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma"}


@dataclass(frozen=True)
class Kernel:
    """A kernel of a compiled program.

    Attributes:
        registers: per thread.
        spilled: bytes of registers per thread that are spilled to memory.
        products: the kinds of tensor core instructions in it: mma, wgmma, tcgen05.
    """

    name: str
    registers: int
    spilled: int
    products: tuple[str, ...]


def tool(name: str) -> str:
    """The path of ptxas or nvdisasm, from a Python package or the machine. Skips the test if there is none."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        for path in Path(folder).glob(f"*/bin/{name}"):
            return str(path)
    return shutil.which(name) or pytest.skip(f"no {name}: pip install '.[aot]'")


def accelerator(name: str) -> jax.Device:
    """The first device of a target. Skips the test if its compiler is not installed."""
    try:
        return target(name).devices()[0]
    except ImportError as error:
        pytest.skip(str(error))


def compile_for(device: jax.Device, function: Callable[..., Any], shapes: Any, folder: Path) -> list[Kernel]:
    """Compiles `function(**shapes)` for a device that need not be present, and returns its Pallas kernels.

    Args:
        shapes: (shape, dtype) of each argument by name, or of each array in an argument.
        folder: where the compiler writes its dumps.
    """
    mesh = jax.sharding.Mesh(np.array([device]), ("one",))
    where = NamedSharding(mesh, jax.P())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(*x, sharding=where), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # Pallas reads the kind of GPU from it since jax 0.11
        lowered = jax.jit(function).lower(**arguments)
    lowered.compile(compiler_options={"xla_dump_to": str(folder), "xla_dump_emitter_re": "ptx|^llvm"})
    return [kernel for path in folder.glob("*.ptx") for kernel in read(path)]


def read(path: Path) -> list[Kernel]:
    """Assembles a PTX file and returns its kernels; none if it holds no Pallas kernel."""
    text = path.read_text()
    if not re.search(r"\.entry \w+_kernel", text):
        return []
    (arch,) = re.findall(r"^\.target (\w+)", text, re.MULTILINE)
    run = subprocess.run(
        [tool("ptxas"), "-v", f"-arch={arch}", str(path), "-o", "/dev/null"], capture_output=True, text=True, check=True
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


def longest_loop(folder: Path, kernel: str) -> int:
    """The number of instructions in the longest loop of a kernel whose PTX is in a folder."""
    (path,) = [path for path in folder.glob("*.ptx") if f".entry {kernel}" in path.read_text()]
    (arch,) = re.findall(r"^\.target (\w+)", path.read_text(), re.MULTILINE)
    binary = path.with_suffix(".cubin")
    subprocess.run([tool("ptxas"), f"-arch={arch}", str(path), "-o", str(binary)], check=True)
    listing = subprocess.run([tool("nvdisasm"), "-c", str(binary)], capture_output=True, text=True, check=True).stdout
    (program,) = [part for part in re.split(r"^\.text\.", listing, flags=re.MULTILINE) if part.startswith(kernel)]
    count, places, lengths = 0, {}, [0]
    for line in program.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            places[label[1]] = count
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            count += 1
            if (back := re.search(r"BRA.*`\((\.L_\w+)\)", instruction[1])) and back[1] in places:
                lengths.append(count - places[back[1]])
    return max(lengths)

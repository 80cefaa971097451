"""Counts collectives and copies of arrays per round of a compiled loop, from XLA's text of the program."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COLLECTIVES = {
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
}

# Instructions that write no new array: names of other arrays, and updates. XLA puts a copy before an update that is not
# in place. Those that are no updates launch no kernel either, apart from the computations that they run.
UPDATES = {"scatter", "dynamic-update-slice"}
NO_LAUNCHES = {
    "get-tuple-element",
    "tuple",
    "parameter",
    "bitcast",
    "constant",
    "optimization-barrier",
    "while",
    "conditional",
    "call",
}
NO_WRITES = UPDATES | NO_LAUNCHES
PRODUCTS = {"dot", "convolution", "custom-call"}  # their results are new numbers, not copies


@dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
        results: for each part of the result, its bytes and whether it lies in the device's main memory. A TPU's
            compiler moves small arrays, and parts of arrays, into faster memory.
        operands: the number of operands.
        calls: the names of the computations that it runs.
    """

    kind: str
    results: tuple[tuple[int, bool], ...]
    operands: int
    calls: tuple[str, ...]

    @classmethod
    def read(cls, line: str) -> Instruction | None:
        """Parses a line of XLA's text. Returns None for a line that is no instruction."""
        found = re.match(r"\s*(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([a-z][\w-]*)\(([^()]*)", line)
        if found is None:
            return None
        result, kind, operands = found.groups()
        # XLA writes a condition that is an integer with branch_computations, and one that is a bool with the other two.
        names = "calls|to_apply|body|condition|(?:called|branch)_computations|(?:true|false)_computation"
        calls = re.findall(rf"(?:{names})=(\{{.*?\}}|\S+)", line)
        parts = re.findall(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", result)
        return cls(
            kind,
            tuple((_nbytes(dtype, dims), "S(" not in layout) for dtype, dims, layout in parts),
            operands.count("%"),
            tuple(name for text in calls for name in re.findall(r"[\w.\-]+", text)),
        )


def _nbytes(dtype: str, dims: str) -> int:
    """The bytes of an array, from a dtype and dimensions as a program writes them: "bf16", "16,2048,128"."""
    width = re.search(r"\d+", dtype)
    bits = int(width[0]) if width else 8  # pred
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


Computations = dict[str, list[Instruction]]


def _read(hlo: str) -> tuple[Computations, list[tuple[str, str]], str]:
    """The computations of a program by name, the condition and the body of each loop, and where the program begins."""
    computations: Computations = {}
    loops: list[tuple[str, str]] = []
    lines: list[Instruction] = []
    entry = ""
    for line in hlo.splitlines():
        if begins := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = computations.setdefault(begins[2], [])
            entry = begins[2] if begins[1] else entry
        elif instruction := Instruction.read(line):
            lines.append(instruction)
            loops += re.findall(r" while\(.*condition=%?([\w.\-]+).*body=%?([\w.\-]+)", line)
    return computations, loops, entry


def _run(computations: Computations, name: str) -> Iterator[tuple[Instruction, tuple[Instruction, ...]]]:
    """The instructions that a computation runs. A fusion is paired with the instructions in it."""
    for instruction in computations[name]:
        inner = [pair for other in instruction.calls for pair in _run(computations, other)]
        if instruction.kind == "fusion":
            yield instruction, tuple(part for part, _ in inner)
        else:
            yield instruction, ()
            yield from inner


@dataclass(frozen=True)
class Loop:
    """The largest loop of a program: its condition and its body.

    Attributes:
        instructions: all instructions of a round. A fusion is paired with the instructions in it.
    """

    instructions: tuple[tuple[Instruction, tuple[Instruction, ...]], ...]

    @classmethod
    def of(cls, hlo: str) -> Loop:
        """Reads the loop from `compiled.as_text()`.

        Raises:
            ValueError: if the program has no loop.
        """
        computations, loops, _ = _read(hlo)
        if not loops:
            raise ValueError("the program has no loop")
        condition, body = max(loops, key=lambda names: len(computations[names[1]]))
        return cls((*_run(computations, condition), *_run(computations, body)))

    @classmethod
    def whole(cls, hlo: str) -> Loop:
        """Reads a whole program, as one round of a loop. Loops in it count once."""
        computations, _, entry = _read(hlo)
        return cls(tuple(_run(computations, entry)))

    @property
    def collectives(self) -> Counter[str]:
        """The number of arrays that each kind of collective moves per round."""
        counts: Counter[str] = Counter()
        for instruction, fused in self.instructions:
            for part in (instruction, *fused):
                kind = part.kind.removesuffix("-start")
                if kind in COLLECTIVES:
                    counts[kind] += part.operands
        return counts

    @property
    def kernels(self) -> int:
        """The number of kernels that a round launches on a GPU, those of all branches included."""
        return sum(instruction.kind not in NO_LAUNCHES for instruction, _ in self.instructions)

    def rewrites(self, nbytes: int) -> list[str]:
        """Lists the arrays of at least `nbytes` that a round writes to main memory in full.

        These are copies, and other instructions that move a cache instead of updating it in place: transpositions,
        conversions, selections, and arrays that come back from faster memory. Matrix products do not count, and neither
        do fetches into faster memory.
        """
        found = []
        for instruction, fused in self.instructions:
            kinds = {part.kind for part in (instruction, *fused)}
            kind = instruction.kind.removesuffix("-start")
            if kind in COLLECTIVES | NO_WRITES or kind.endswith("-done") or kinds & PRODUCTS:
                continue
            results = instruction.results
            if instruction.kind == "copy-start":  # destination, source, context
                results = results[:1]
            if instruction.kind == "slice-start":  # source, destination, context
                results = results[1:2]
            written = [size for size, main in results if main and size >= nbytes]
            updated = [size for part in fused if part.kind in UPDATES for size, _ in part.results if size >= nbytes]
            found += [f"{instruction.kind} of {size:,} bytes" for size in written[len(updated) :]]
        return found

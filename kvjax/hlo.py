"""What a compiled loop does in each round, read from XLA's text of the program: collectives, and copies of arrays."""

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

# What makes no new array: names of others, and updates in place. If one is not in place, XLA has put a copy before it.
UPDATES = {"scatter", "dynamic-update-slice"}
NO_WRITES = UPDATES | {
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
PRODUCTS = {"dot", "convolution", "custom-call"}  # what they write is no array of before


@dataclass(frozen=True)
class Instruction:
    """A line of a program.

    Attributes:
        results: bytes of each part of its result, and whether that part lies in the device's main memory (a TPU's
            compiler moves parts of arrays, or small ones, into faster memory).
        operands: how many there are.
        calls: the computations that it runs, by name.
    """

    kind: str
    results: tuple[tuple[int, bool], ...]
    operands: int
    calls: tuple[str, ...]

    @classmethod
    def read(cls, line: str) -> Instruction | None:
        found = re.match(r"\s*(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([a-z][\w-]*)\(([^()]*)", line)
        if found is None:
            return None
        result, kind, operands = found.groups()
        calls = re.findall(
            r"(?:calls|to_apply|body|condition|called_computations|branch_computations)=(\{.*?\}|\S+)", line
        )
        parts = re.findall(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", result)
        return cls(
            kind,
            tuple((_nbytes(dtype, dims), "S(" not in layout) for dtype, dims, layout in parts),
            operands.count("%"),
            tuple(name for text in calls for name in re.findall(r"[\w.\-]+", text)),
        )


def _nbytes(dtype: str, dims: str) -> int:
    """Of an array as a program names it: "bf16", "16,2048,128"."""
    width = re.search(r"\d+", dtype)
    bits = int(width[0]) if width else 8  # pred
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


@dataclass(frozen=True)
class Loop:
    """A program's largest loop: its body and its condition.

    Attributes:
        instructions: all that a round runs, each with what it runs in turn if it is a fusion.
    """

    instructions: tuple[tuple[Instruction, tuple[Instruction, ...]], ...]

    @classmethod
    def of(cls, hlo: str) -> Loop:
        """From `compiled.as_text()`. Raises ValueError for a program without a loop."""
        computations: dict[str, list[Instruction]] = {}
        loops: list[tuple[str, str]] = []
        lines: list[Instruction] = []
        for line in hlo.splitlines():
            if begins := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                lines = computations.setdefault(begins[1], [])
            elif instruction := Instruction.read(line):
                lines.append(instruction)
                loops += re.findall(r" while\(.*condition=%?([\w.\-]+).*body=%?([\w.\-]+)", line)
        if not loops:
            raise ValueError("the program has no loop")

        def run(name: str) -> Iterator[tuple[Instruction, tuple[Instruction, ...]]]:
            for instruction in computations[name]:
                inner = [pair for other in instruction.calls for pair in run(other)]
                if instruction.kind == "fusion":
                    yield instruction, tuple(part for part, _ in inner)
                else:
                    yield instruction, ()
                    yield from inner

        condition, body = max(loops, key=lambda names: len(computations[names[1]]))
        return cls((*run(condition), *run(body)))

    @property
    def collectives(self) -> Counter[str]:
        """How many arrays each kind of collective moves in a round."""
        counts: Counter[str] = Counter()
        for instruction, fused in self.instructions:
            for part in (instruction, *fused):
                kind = part.kind.removesuffix("-start")
                if kind in COLLECTIVES:
                    counts[kind] += part.operands
        return counts

    def rewrites(self, nbytes: int) -> list[str]:
        """Arrays of at least so many bytes that a round writes whole to main memory, from others that lie there.

        That is copies, and whatever else moves a cache instead of updating it in place: transpositions, conversions,
        selections, and what was fetched into faster memory and comes back. Products of matrices do not count, nor does
        what is fetched into faster memory.
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

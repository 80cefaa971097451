"""Lists what XLA launches outside of CUDA graphs, from its list of a program's launches ("thunks").

A launch outside of a graph, a condition or a loop makes the host wait for the device, or the device for the host.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from pathlib import Path

import jax

GRAPH, LOOP = "kCommandBuffer", "kWhile"


def compile_listed(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """Compiles for GPUs. Returns the program and XLA's list of its launches, in which graphs have been formed.

    Raises:
        ValueError: if XLA writes no list, as for other devices than GPUs.
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        lists = [path.read_text() for path in Path(folder).glob("*thunk_sequence_after_thunk_passes.txt")]
    if not lists:
        raise ValueError("XLA wrote no list of launches: expected a program for GPUs that no cache holds")
    return compiled, max(lists, key=len)


def outside_graphs(launches: str) -> Counter[str]:
    """Counts what the program's largest loop launches outside of graphs, by kind, in the loop's own condition and body.

    Loops and conditions inside of the loop count as well if they are not part of a graph, and so does what they launch.

    Raises:
        ValueError: if the program has no loop.
    """
    kinds: list[str] = []
    above: list[tuple[int, ...]] = []  # the launches that contain each launch, outermost first
    stack: list[tuple[int, int]] = []  # (indentation, launch)
    for indentation, kind in re.findall(r"^( *)\d+: (k\w+)", launches, re.MULTILINE):
        while stack and stack[-1][0] >= len(indentation):
            stack.pop()
        above.append(tuple(launch for _, launch in stack))
        stack.append((len(indentation), len(kinds)))
        kinds.append(kind)
    loops = [i for i, kind in enumerate(kinds) if kind == LOOP]
    if not loops:
        raise ValueError("the program has no loop")
    largest = max(loops, key=lambda loop: sum(loop in parents for parents in above))
    return Counter(
        kind
        for kind, parents in zip(kinds, above, strict=True)
        if largest in parents and kind != GRAPH and not any(kinds[parent] == GRAPH for parent in parents)
    )

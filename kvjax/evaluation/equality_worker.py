"""The program of `equality.equal`: reads a JSON pair per line and writes whether math-verify finds its texts equal.

It runs as a process of its own because simplifying a hostile expression can take any time and memory, and because the
timeouts of math-verify are signals, which a thread cannot set.
"""

from __future__ import annotations

import json
import sys

MEMORY = 2**32  # bytes of address space


def main() -> None:
    """Writes an empty line, or why it cannot work, and then a line per pair."""
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing else may write there

    def reply(text: str) -> None:
        print(text, file=replies, flush=True)

    try:
        import math_verify
        from sympy.core import random
    except ImportError as error:
        reply(f"{type(error).__name__}: {error}")
        return
    limit_memory()
    latex = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    reply("")
    for line in sys.stdin:
        random.seed(0)  # of the points at which sympy compares expressions
        try:
            answer, reference = (
                math_verify.parse(rf"\boxed{{{text}}}", latex, parsing_timeout=None) for text in json.loads(line)
            )
            same = math_verify.verify(reference, answer, timeout_seconds=None)
        except Exception:  # of a parser or of sympy, for a text that is no mathematics
            same = False
        reply(json.dumps(same))


def limit_memory() -> None:
    """Makes large expressions raise MemoryError, on systems that have such limits."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    main()

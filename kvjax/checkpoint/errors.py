"""The exception that `kvjax.checkpoint` defines."""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be read: it is absent, incomplete, corrupt, or in a form that is not accepted.

    Catch it as `kvjax.checkpoint.CheckpointError`. One error lists every problem that was found, not only the first.
    A checkpoint whose config asks for a computation that kvjax does not implement raises
    `kvjax.models.UnsupportedModelError` instead. Both are ValueErrors.

    Attributes:
        problems: one sentence per problem.

    Args:
        source: the checkpoint as the message names it: its folder, or its name on the hub.
        problems: the value of the attribute; at least one.
    """

    def __init__(self, source: object, problems: Sequence[str]):
        self.problems = tuple(problems)
        listed = problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"cannot load {source}: {listed}")

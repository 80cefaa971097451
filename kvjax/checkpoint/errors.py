"""The exception that `kvjax.checkpoint` defines, and the errors of Orbax in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LONGEST = 1000  # characters of the message of another library
MOST = 20  # tensors that a message names


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
        text = problems[0] if len(problems) == 1 else "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(f"cannot load {source}: {text}")


def listed(names: Sequence[str]) -> str:
    """Returns the first names, and the number of the others: a model with experts has thousands of tensors."""
    more = len(names) - MOST
    return ", ".join(names[:MOST]) + (f" and {more:,} more" if more > 0 else "")


def one_line(error: BaseException) -> str:
    """Returns the exception's type and its message in one line, without the specification of TensorStore.

    The whole message stays, up to LONGEST characters, because the advice of other libraries is often in its last lines.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = text.partition(" [tensorstore_spec=")[0].partition(" [source locations=")[0]
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[-LONGEST // 2 :]}"


@contextmanager
def orbax_writes() -> Iterator[None]:
    """Turns the errors of TensorStore, such as a full disk, into OSErrors of one line.

    Raises:
        OSError: a file cannot be written. It names no file; `new_folder` adds the folder.
    """
    try:
        yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error

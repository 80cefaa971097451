"""Commands as tests run them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import typer.testing
from typer.main import get_command

from kvjax.cli import app
from kvjax.files.texts import Stream

PROMPT = "the code of adam is sword . recall what the code of adam is :"

typer.testing._get_command = cache(get_command)  # making all commands takes a tenth of a second


def kv(*arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command. An error that is not expected is raised here."""
    result = typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


class KilledError(Exception):
    """The process has ended."""


def kill_training(*command: object) -> None:
    """Runs a command that trains, which ends in its sixth step."""
    windows = Stream.windows

    def failing(self: Stream, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
        if rng.bit_generator.seed_seq.entropy == [0, 5]:
            raise KilledError
        return windows(self, count, length, rng)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Stream, "windows", failing)
        with pytest.raises(KilledError):
            kv(*command)

"""Commands as tests run them."""

from __future__ import annotations

from typer.testing import CliRunner

from kvjax.cli import app

PROMPT = "the code of adam is sword . recall what the code of adam is :"


def kv(*arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command. An error that is not expected is raised here."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr

"""Arbitrary values of all options of all commands: each call is accepted, or refused in one line with status 2."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvjax.cli import app
from kvjax.cli.evaluate import INCOMPLETE
from tests.cli.commands import PROMPT
from tests.request.test_odd_arguments import AcceptedError, without_programs

ODD = (
    *("", " ", "x", "é", "\udc80", "a" * 5000, "-" * 300, "[/x]", "[bold]", "{}", "null", "true", "*", "a,b", "%s"),
    *("0", "-1", "1", "1.5", "nan", "inf", "1e999", "99999999999999999999", "9" * 5000, "0x0", "2x2", "1x99", "9/2"),
    *("..", "/", "/dev/null", "/dev/full", "nowhere/else", "full", "h2o:budget=-1", "snapkv:budget=x", "greedy,p=1"),
)
CALLS = 6  # of each option
BASES = {  # arguments that are accepted
    "generate": ["MODEL", PROMPT],
    "info": ["MODEL"],
    "convert": ["MODEL", "out", "--to", "orbax"],
    "demo": [],
    "eval": ["--dry-run"],
    "compare": ["MODEL", "--policy=full", "--tasks=demo/keys", "--length=64", "--limit=1"],
    "report": ["nowhere"],
    "inspect": ["MODEL", "--prompt", PROMPT],
    "plan": ["MODEL", "--memory", "1GB"],
    "chat": ["MODEL"],
    "serve": ["MODEL"],
    "measure-statistics": ["MODEL", "--data=nowhere", "--out=out"],
    "train-gates": ["MODEL", "--method=kvzap", "--data=nowhere", "--out=out"],
}
COMMANDS: Any = get_command(app)


def calls(name: str, model: str) -> Iterator[list[str]]:
    """The command line with an odd value of each argument and option in turn."""
    base, rng = [model if argument == "MODEL" else argument for argument in BASES[name]], random.Random(name)
    place = 0
    for parameter in COMMANDS.commands[name].params:
        for value in rng.sample(ODD, CALLS):
            if parameter.param_type_name == "argument":
                yield [*base[:place], value, *base[place + 1 :]]
            elif not parameter.is_flag:
                yield [*base, f"{parameter.opts[0]}={value}"]
        place += parameter.param_type_name == "argument"


def outcome(arguments: list[str]) -> str:
    """ "accepted", "refused" with one line, or what went wrong."""
    result = CliRunner().invoke(app, arguments)
    lines = result.stderr.splitlines()
    if isinstance(result.exception, AcceptedError) or result.exit_code in (0, INCOMPLETE):
        return "accepted"
    if not isinstance(result.exception, SystemExit):
        return repr(result.exception)
    errors = [line for line in lines if not line.startswith("kvjax: warning: ")]
    if result.exit_code == 2 and len(errors) == 1 and errors[0].startswith("kvjax: error: ") and len(errors[0]) < 1500:
        return "refused"
    return f"status {result.exit_code}: {result.output}"


@pytest.mark.long
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("command", COMMANDS.commands)
def test_odd_values_of_options(command: str, shallow_model: str, tmp_path: Path) -> None:
    """Programs do not run: a request that is accepted ends there."""
    with without_programs(tmp_path):
        found = {tuple(arguments): outcome([command, *arguments]) for arguments in calls(command, shallow_model)}
    assert {arguments: said for arguments, said in found.items() if said not in ("accepted", "refused")} == {}
    assert "refused" in found.values()

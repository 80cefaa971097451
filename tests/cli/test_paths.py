"""Options that name files and folders, and sizes: what does not suit is refused before a model is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.main import get_command

from kvjax.cli import app
from tests.cli.commands import PROMPT, kv

COMMANDS: Any = get_command(app)


def _kind(command: Any, parameter: Any) -> str:
    """The type of a parameter of a command, in words."""
    return str(get_type_hints(command.callback).get(parameter.name))


TRAINING = ("MODEL", "--data", "TEXT", "--out", "NEW")
BASES: dict[str, tuple[str, ...]] = {
    "generate": ("MODEL", PROMPT, "--chat"),
    "chat": ("MODEL",),
    "convert": ("MODEL",),
    "demo": ("--model", "MODEL", "--data", "ESSAYS", "--length", "256"),
    "eval": (),
    "report": (),
    "compare": ("MODEL", "--policy", "full", "--tasks", "demo/needle", "--length", "64"),
    "inspect": ("MODEL", "--prompt", PROMPT),
    "generate --prompt-file": ("MODEL",),
    "inspect --prompt-file": ("MODEL",),
    **{f"report {option}": ("FOLDER",) for option in ("--out", "--csv", "--parquet", "--leaderboard")},
    "report --beside": ("FOLDER", "--leaderboard", "NEW"),
    "serve": ("MODEL", "--prefix-memory", "1MB", "--port", "0"),
    "train-gates": (*TRAINING, "--method", "kvzap"),
    "measure-statistics": TRAINING,
}
FILE, BELOW, ABSENT, FOLDER = "TEXT", "BELOW", "ABSENT", "FOLDER"  # FOLDER has a file, which is no text
BAD: dict[tuple[str, str], tuple[str, ...]] = {
    ("generate", "--prompt-file"): (ABSENT, FOLDER),
    ("generate", "--chat-template"): (ABSENT, FOLDER),
    ("generate", "--gates"): (FILE, ABSENT, FOLDER),
    ("chat", "--chat-template"): (ABSENT, FOLDER),
    ("chat", "--gates"): (FILE, ABSENT, FOLDER),
    ("convert", "out"): (FILE, BELOW, FOLDER),
    ("demo", "--data"): (FILE, ABSENT, FOLDER),
    ("demo", "--out"): (FILE, BELOW),
    ("eval", "--config"): (ABSENT, FOLDER),
    ("eval", "--out"): (FILE, BELOW),
    ("report", "runs"): (FILE, ABSENT, FOLDER),
    ("report", "--out"): (FILE, BELOW, FOLDER),
    ("report", "--csv"): (FILE, ABSENT, FOLDER),
    ("report", "--parquet"): (FILE, ABSENT, FOLDER),
    ("report", "--leaderboard"): (FILE, ABSENT, FOLDER),
    ("report", "--beside"): (FILE, ABSENT, FOLDER),
    ("compare", "--gates"): (FILE, ABSENT, FOLDER),
    ("compare", "--out"): (FILE, BELOW),
    ("compare", "--picture"): (FILE, ABSENT, FOLDER),
    ("inspect", "--prompt-file"): (ABSENT, FOLDER),
    ("inspect", "--gates"): (FILE, ABSENT, FOLDER),
    ("inspect", "--out"): (FILE, ABSENT, FOLDER),
    ("serve", "--prefix-folder"): (FILE, BELOW),
    ("serve", "--chat-template"): (ABSENT, FOLDER),
    ("serve", "--gates"): (FILE, ABSENT, FOLDER),
    ("train-gates", "--data"): (ABSENT, FOLDER),
    ("train-gates", "--out"): (FILE, BELOW, FOLDER),
    ("measure-statistics", "--data"): (ABSENT, FOLDER),
    ("measure-statistics", "--out"): (FILE, BELOW, FOLDER),
}
UNREAD = {("eval", "--data"), ("compare", "--data")}  # the tasks say what they need of it


def test_all_options_are_here() -> None:
    found = {
        (name, parameter.opts[0])
        for name, command in COMMANDS.commands.items()
        for parameter in command.params
        if "Path" in _kind(command, parameter) or parameter.opts[0] == "--gates"
    }
    assert found == BAD.keys() | UNREAD


SEEDS = {(name, "--seed") for name in ("generate", "chat", "inspect")}  # any integer of 64 bits
NUMBERS = [
    (name, option.opts[0], "80" if option.opts[0].endswith("memory") else "-5")
    for name, command in COMMANDS.commands.items()
    for option in command.params
    if (name, option.opts[0]) not in SEEDS and name in BASES
    if re.search(r"\bint\b", _kind(command, option)) or option.opts[0].endswith("memory")
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with texts, where weights cannot be read."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("kvjax.checkpoint.named.load", load)
    monkeypatch.setattr("kvjax.checkpoint.convert.load", load)
    for name in ("text.txt", "folder/data.bin", "essays/essays.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("the code of adam is sword . " * 9)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(model: str, command: str, option: str, value: str) -> str:
    """The one line with which a command refuses an option."""
    names = {"MODEL": model, "NEW": "new", FILE: "text.txt", "ESSAYS": "essays", FOLDER: "folder"}
    given = [names.get(text, text) for text in BASES.get(f"{command} {option}", BASES[command])]
    status, stdout, stderr = kv(command, *given, *([option] if option.startswith("--") else []), value)
    assert (status, stdout) == (2, ""), stderr
    (error,) = (line for line in stderr.splitlines() if "warning: " not in line)
    return error


@pytest.mark.parametrize(
    ("command", "option", "value"), [(*place, value) for place, values in BAD.items() for value in values]
)
def test_a_path_that_does_not_suit(command: str, option: str, value: str, shallow_model: str, place: Path) -> None:
    path = place / {FILE: "text.txt", BELOW: "text.txt/more", FOLDER: "folder", ABSENT: "absent/more"}[value]
    error = refusal(shallow_model, command, option, str(path))
    assert path.name in error or "absent" in error or "text.txt is a file" in error


@pytest.mark.parametrize(("command", "option", "value"), NUMBERS)
def test_a_number_that_does_not_suit(command: str, option: str, value: str, shallow_model: str, place: Path) -> None:
    error = refusal(shallow_model, command, option, value)
    assert option.strip("-").replace("-", "_") in error.replace("-", "_")

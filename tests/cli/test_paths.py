"""Options that name files and folders: what cannot be read or written is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.main import get_command

from kvjax.cli import app
from tests.cli.commands import PROMPT, kv

COMMANDS: Any = get_command(app)
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
FILE, ABSENT, FOLDER = "TEXT", "ABSENT", "FOLDER"  # FOLDER has a file, which is no text
BAD: dict[tuple[str, str], tuple[str, ...]] = {
    ("generate", "--prompt-file"): (ABSENT, FOLDER),
    ("generate", "--chat-template"): (ABSENT, FOLDER),
    ("generate", "--gates"): (FILE, ABSENT, FOLDER),
    ("chat", "--chat-template"): (ABSENT, FOLDER),
    ("chat", "--gates"): (FILE, ABSENT, FOLDER),
    ("convert", "out"): (FILE, FOLDER),
    ("demo", "--data"): (FILE, ABSENT, FOLDER),
    ("demo", "--out"): (FILE,),
    ("eval", "--config"): (ABSENT, FOLDER),
    ("eval", "--out"): (FILE,),
    ("report", "runs"): (FILE, ABSENT, FOLDER),
    ("report", "--out"): (FILE, FOLDER),
    ("report", "--csv"): (FILE, ABSENT, FOLDER),
    ("report", "--parquet"): (FILE, ABSENT, FOLDER),
    ("report", "--leaderboard"): (FILE, ABSENT, FOLDER),
    ("report", "--beside"): (FILE, ABSENT, FOLDER),
    ("compare", "--gates"): (FILE, ABSENT, FOLDER),
    ("compare", "--out"): (FILE,),
    ("compare", "--picture"): (FILE, ABSENT, FOLDER),
    ("inspect", "--prompt-file"): (ABSENT, FOLDER),
    ("inspect", "--gates"): (FILE, ABSENT, FOLDER),
    ("inspect", "--out"): (FILE, ABSENT, FOLDER),
    ("serve", "--prefix-folder"): (FILE,),
    ("serve", "--chat-template"): (ABSENT, FOLDER),
    ("serve", "--gates"): (FILE, ABSENT, FOLDER),
    ("train-gates", "--data"): (ABSENT, FOLDER),
    ("train-gates", "--out"): (FILE, FOLDER),
    ("measure-statistics", "--data"): (ABSENT, FOLDER),
    ("measure-statistics", "--out"): (FILE, FOLDER),
}
UNREAD = {("eval", "--data"), ("compare", "--data")}  # the tasks say what they need of it


def test_all_options_are_here() -> None:
    found = {
        (name, parameter.opts[0])
        for name, command in COMMANDS.commands.items()
        for parameter in command.params
        if "Path" in str(get_type_hints(command.callback).get(parameter.name)) or parameter.opts[0] == "--gates"
    }
    assert found == BAD.keys() | UNREAD


@pytest.mark.parametrize(
    ("command", "option", "value"), [(*place, value) for place, values in BAD.items() for value in values]
)
def test_a_path_that_does_not_suit(
    command: str, option: str, value: str, shallow_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("kvjax.checkpoint.named.load", load)
    monkeypatch.setattr("kvjax.checkpoint.convert.load", load)
    names = {"MODEL": shallow_model, "NEW": "new", FILE: "text.txt", FOLDER: "folder", "ESSAYS": "essays"}
    for name in ("TEXT", "FOLDER/data.bin", "ESSAYS/essays.txt"):
        base, _, inside = name.partition("/")
        place = tmp_path / names[base] / inside
        place.parent.mkdir(exist_ok=True)
        place.write_text("the code of adam is sword . " * 9)
    given = [names.get(text, text) for text in BASES.get(f"{command} {option}", BASES[command])]
    place = tmp_path / names.get(value, "absent/more")
    given += [option, str(place)] if option.startswith("--") else [str(place)]
    monkeypatch.chdir(tmp_path)
    status, stdout, stderr = kv(command, *given)
    assert (status, stdout) == (2, ""), stderr
    errors = [line for line in stderr.splitlines() if "warning: " not in line]
    assert len(errors) == 1
    assert place.name in errors[0] or "absent" in errors[0]

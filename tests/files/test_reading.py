"""Files that have no end, or are too large, are refused before they are read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvjax.cli import app
from kvjax.evaluation.grid import Grid
from kvjax.evaluation.tasks.files import read
from kvjax.evaluation.tasks.task import DataError
from kvjax.evaluation.tasks.vocabulary import tokenizer
from kvjax.files.reading import read_bytes, read_text
from kvjax.files.texts import read_stream
from kvjax.methods.common.head_numbers import read_numbers
from tests.cli.commands import kv
from tests.patience import PATIENCE

ENDLESS = "/dev/zero"


def test_a_file_of_the_largest_size_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xc3\xa9\r\na\rb\n")
    assert read_text(path, 8) == "é\na\nb\n"
    path.write_bytes(b"\xef\xbb\xbfmodel,policy")  # as spreadsheets save CSV
    assert read_text(path) == "model,policy"
    with pytest.raises(ValueError, match=r"file is too large: expected a grid of at most 7 B"):
        read_bytes(path, 7, "a grid")
    path.write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=r"file is not UTF-8 text: .* position 1: .*; expected a grid in UTF-8"):
        read_text(path, expected="a grid")


def test_a_pipe_without_an_end_is_read_so_far(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)
            except BrokenPipeError:
                pass

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(ValueError, match="too large"):
        read_bytes(path, 10_000)
    writer.join(PATIENCE)
    assert not writer.is_alive()


def test_what_reads_files_of_users_refuses_devices(tmp_path: Path) -> None:
    for name in ("link", "a.txt", "a.json", "a.tsv"):
        (tmp_path / name).symlink_to(ENDLESS)
    with pytest.raises(ValueError, match=r"a\.txt is a device: expected a text file"):
        read_stream(tmp_path, tokenizer(), 1)
    for name in ("a.json", "a.tsv"):
        with pytest.raises(ValueError, match=f"{name}' cannot be read .*{name} is a device"):
            read_numbers("heads", tmp_path / name)
    for path in (ENDLESS, str(tmp_path / "link")):
        with pytest.raises(ValueError, match=f"{path} is a device: expected a YAML file"):
            Grid.read(path)
        with pytest.raises(DataError, match=f"{path} is a device: expected a file"):
            read(Path(path))
        for command in (["generate", "nowhere"], ["inspect", "nowhere"]):
            status, _, stderr = kv(*command, "--prompt-file", path)
            assert (status, stderr) == (2, f"kvjax: error: {path} is a device: expected a text file\n")


def test_standard_input_is_read_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvjax.cli.console.LONGEST_PROMPT", 1000)
    result = CliRunner().invoke(app, ["generate", "nowhere", "--prompt-file", "-"], input="x" * 2000)
    assert result.exit_code == 2
    assert "standard input has more than 1,000 characters: expected a shorter prompt" in result.stderr

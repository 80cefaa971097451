"""What the commands share: errors in a line, progress on stderr, numbers for people, compiled programs kept on disk."""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

FAILED = 2  # the exit status of every expected error, as of a wrong option


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


class Commands(TyperGroup):
    """Shows expected errors as a line on stderr, with exit status 2; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if isinstance(error, ValueError) and not _ours(error.__traceback__):
                raise
            typer.echo(f"kvjax: error: {error}", err=True)
            raise typer.Exit(FAILED) from None


def _ours(traceback: TracebackType | None) -> bool:
    """Whether an error was raised by kvjax itself: others' ValueErrors mean that kvjax called them wrongly."""
    name = ""
    while traceback is not None:
        name, traceback = traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_next
    return name.partition(".")[0] == "kvjax"


def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning in a line, without the place in the code that a user of a command has no use for."""
    typer.echo(f"kvjax: warning: {message}", err=True)


def working(text: str, *, quiet: bool = False) -> AbstractContextManager[Any]:
    """A spinner on stderr while something takes long; nothing where stderr is no terminal."""
    console = stderr()
    return nullcontext() if quiet or not console.is_terminal else console.status(text)


def print_json(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def prompt_text(prompt: str | None, file: Path | None, named: str) -> str:
    """A prompt that is given as it is, by an argument so named, or in a file. Raises ValueError."""
    if (prompt is None) == (file is None):
        raise ValueError(f"accepted is either {named} or --prompt-file")
    if file is not None:
        try:
            prompt = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not text in UTF-8: {error}") from None
    if not prompt:
        raise ValueError("an empty prompt; accepted is a text of at least one token")
    return prompt


def bytes_text(count: float) -> str:
    """12345678 -> '12.3 MB', in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{f'{count:#.3g}'.rstrip('.')} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def keep_compiled() -> None:
    """Keeps compiled programs in the user's cache folder, so that only the first run of a command compiles them.

    JAX_COMPILATION_CACHE_DIR, where it is set, names another folder, or none if it is empty.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(home) / "kvjax" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

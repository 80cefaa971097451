"""The lines of `results.jsonl` and `timings.jsonl`: JSON objects with the fields that runs write and reports read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from kvjax.checks import shown
from kvjax.evaluation.grid import SETTINGS

Key: TypeAlias = tuple[Any, ...]
Line: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[Any], str | None]
"""Says what a field must be if its value is something else."""

KEY = ("policy", "budget", "question", "task", "length", "id", "asked")


def key_of(line: Mapping[str, Any]) -> Key:
    """The fields that identify a line; they are unique within a run."""
    return tuple(line[name] for name in KEY)


def encoded(line: Mapping[str, Any]) -> bytes:
    """A line as JSON in UTF-8, with its line end."""
    return (json.dumps(line, ensure_ascii=False) + "\n").encode()


def read_answer(data: bytes) -> Line:
    """Parses a line of `results.jsonl`: an answer with its scores, or an error. Raises ValueError, which says why."""
    line = _parsed(data)
    _check(line, {name: _scalar for name in KEY})
    if "error" in line:
        _check(line, {"error": _text})
    else:
        _check(line, _CELL | _ANSWER)
    return line


def read_timing(data: bytes) -> Line:
    """Parses a line of `timings.jsonl`, whose batch may have failed. Raises ValueError, which says why."""
    line = _parsed(data)
    _check(line, _CELL | (_SECONDS if "read_seconds" in line else {}))
    return line


def read_lines(path: Path, read: Callable[[bytes], Line]) -> list[Line]:
    """Reads a file. Raises ValueError, which names the file, the line and its problem."""
    found = []
    for number, data in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        try:
            found.append(read(data))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; kvjax eval repairs it") from None
    return found


def checked_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """The scores as a metric returns them. Raises ValueError unless each is a finite number."""
    if problem := _scores(given := dict(scores)):
        raise ValueError(f"scores={shown(given)}: expected {problem}")
    return given


def _parsed(data: bytes) -> Line:
    try:
        line = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise ValueError("it is incomplete or no JSON") from None
    if not isinstance(line, dict) or not data.endswith(b"\n"):
        raise ValueError("it is incomplete: expected a JSON object and a line end")
    return line


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _check(line: Line, checks: Mapping[str, Check]) -> None:
    for name, check in checks.items():
        if name not in line:
            raise ValueError(f"it has no {name}")
        if problem := check(line[name]):
            raise ValueError(f"its {name} is {_short(line[name])}: expected {problem}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_number(value: Any) -> bool:
    """Whether a value is a finite integer or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any, least: float = 0) -> str | None:
    return None if is_number(value) and value >= least else f"a number >= {least:g}"


def _positive(value: Any) -> str | None:
    return _number(value, 1)


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a text"


def _scalar(value: Any) -> str | None:
    return None if value is None or isinstance(value, str) or is_number(value) else "a text, a number or null"


def _optional(value: Any) -> str | None:
    return None if value is None or is_number(value) else "a number or null"


def _setting(value: Any) -> str | None:
    return None if value in SETTINGS else f"one of {', '.join(SETTINGS)}"


def _list(value: Any) -> str | None:
    return None if isinstance(value, list) else "a list"


def _mapping(value: Any) -> str | None:
    return None if isinstance(value, dict) else "an object"


def _numbers(value: Any) -> str | None:
    fits = isinstance(value, list) and bool(value) and all(_number(x) is None for x in value)
    return None if fits else "a list of numbers >= 0"


def _scores(value: Any) -> str | None:
    fits = isinstance(value, dict) and all(isinstance(name, str) and is_number(x) for name, x in value.items())
    return None if fits else "an object of finite numbers"


_CELL: dict[str, Check] = {"policy": _text, "budget": _optional, "question": _setting}
_ANSWER: dict[str, Check] = {
    "task": _text,
    "length": _optional,
    "id": _text,
    "asked": _number,
    "text": _text,
    "scores": _scores,
    "tokens": _list,
    "prompt_tokens": _positive,
    "compressed_tokens": _positive,
    "kept": _numbers,
    "kv_bytes_end": _number,
    "meta": _mapping,
}
_SECONDS: dict[str, Check] = {
    "read_seconds": _number,
    "ask_seconds": _number,
    "decode_seconds": _number,
    "decoded_tokens": _number,
    "prompts": _positive,
    "answers": _positive,
}

"""The lines of `results.jsonl` and `timings.jsonl`: JSON objects with the fields that runs write and reports read."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

from kvjax.checks import is_number, shown
from kvjax.evaluation.entries import SETTINGS

Key: TypeAlias = tuple[Any, ...]
Line: TypeAlias = dict[str, Any]

ASKED = ("task", "length", "id", "asked")  # what identifies a question
QUESTION = ("question_text", "answers", "prompt_tokens")  # what a question is; older lines lack the first two
KEY = ("policy", "budget", "question", *ASKED)


class Check(NamedTuple):
    """A condition on a field, in words and as a function."""

    expected: str
    fits: Callable[[Any], bool]


def key_of(line: Mapping[str, Any]) -> Key:
    """The fields that identify a line; they are unique within a run."""
    return tuple(line[name] for name in KEY)


def encoded(line: Mapping[str, Any]) -> bytes:
    """A line as JSON in UTF-8, with its line end."""
    # JSON escapes lone surrogates, of an id or an error, as Python does
    return (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def read_answer(data: bytes) -> Line:
    """Parses a line of `results.jsonl`: an answer with its scores, or an error. Raises ValueError, which says why."""
    line = _parsed(data)
    _check(line, dict.fromkeys(KEY, _SCALAR))
    if "error" in line:
        _check(line, {"error": _TEXT})
    else:
        _check(line, _CELL | _ANSWER)
    return line


def read_timing(data: bytes) -> Line:
    """Parses a line of `timings.jsonl`, whose batch may have failed. Raises ValueError, which says why."""
    line = _parsed(data)
    _check(
        line,
        _CELL | (_SECONDS if "read_seconds" in line else {}) | ({"questions": _ROWS} if "questions" in line else {}),
    )
    return line


def content(path: Path) -> bytes:
    """The content of a file. If its name ends with .gz, gzip has compressed it. Raises ValueError if it is damaged."""
    data = path.read_bytes()
    try:
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: gzip cannot read it ({error})") from None


def read_lines(path: Path, read: Callable[[bytes], Line]) -> list[Line]:
    """Reads a file. Raises ValueError, which names the file, the line and its problem."""
    found = []
    for number, data in enumerate(content(path).splitlines(keepends=True), 1):
        try:
            found.append(read(data))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; kvjax eval repairs it") from None
    return found


def decoding_speed(timings: Sequence[Mapping[str, Any]]) -> float | None:
    """Decoded tokens per second, where no other policy took the same steps; None if no token took a step."""
    alone = [took for took in timings if took.get("together", 1) == 1]
    seconds, tokens = (sum(took[name] for took in alone) for name in ("decode_seconds", "decoded_tokens"))
    return tokens / seconds if tokens and seconds else None


def checked_scores(scores: Mapping[str, float]) -> dict[str, float]:
    """The scores as a metric returns them. Raises ValueError unless each is a finite number."""
    if not _SCORES.fits(given := dict(scores)):
        raise ValueError(f"scores={shown(given)}: expected {_SCORES.expected}")
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
        if not check.fits(line[name]):
            value = repr(line[name])
            brief = value if len(value) <= 60 else f"{value[:57]}..."
            raise ValueError(f"its {name} is {brief}: expected {check.expected}")


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and all(map(_SCALAR.fits, value))


def _is_scores(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) and is_number(x) for name, x in value.items())


_NUMBER = Check("a number >= 0", lambda x: is_number(x) and x >= 0)
_POSITIVE = Check("a number >= 1", lambda x: is_number(x) and x >= 1)
_NUMBERS = Check("a list of numbers >= 0", lambda x: isinstance(x, list) and bool(x) and all(map(_NUMBER.fits, x)))
_OPTIONAL = Check("a number or null", lambda x: x is None or is_number(x))
_SCALAR = Check("a text, a number or null", lambda x: x is None or isinstance(x, str) or is_number(x))
_SCORES = Check("an object of finite numbers", _is_scores)
_SETTING = Check(f"one of {', '.join(SETTINGS)}", lambda x: x in SETTINGS)
_TEXT = Check("a text", lambda x: isinstance(x, str))
_LIST = Check("a list", lambda x: isinstance(x, list))
_ROWS = Check("a list of lists of texts, numbers and nulls", lambda x: isinstance(x, list) and all(map(_is_row, x)))
_MAPPING = Check("an object", lambda x: isinstance(x, dict))

_CELL: dict[str, Check] = {"policy": _TEXT, "budget": _OPTIONAL, "question": _SETTING}
_ANSWER: dict[str, Check] = {
    "task": _TEXT,
    "length": _OPTIONAL,
    "id": _TEXT,
    "asked": _NUMBER,
    "text": _TEXT,
    "scores": _SCORES,
    "tokens": _LIST,
    "prompt_tokens": _POSITIVE,
    "compressed_tokens": _POSITIVE,
    "kept": _NUMBERS,
    "kv_bytes_end": _NUMBER,
    "meta": _MAPPING,
}
_SECONDS: dict[str, Check] = {
    "read_seconds": _NUMBER,
    "ask_seconds": _NUMBER,
    "decode_seconds": _NUMBER,
    "decoded_tokens": _NUMBER,
    "prompts": _POSITIVE,
    "answers": _POSITIVE,
}

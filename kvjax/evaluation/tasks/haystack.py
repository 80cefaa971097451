"""Sources of haystacks: Paul Graham's essays, from the user's own files, and the word lists of wonderwords.

The licence of the essays does not allow kvjax to distribute them.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from kvjax.checks import installs

from .files import Record, parse, read, read_text
from .task import DataError, Source

ESSAYS = ("essays.txt", "PaulGrahamEssays.json", "PaulGrahamEssays")
SENTENCE_END = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["')])\s+""")


def essays(source: Source) -> str:
    """The text of the essays, from `essays.txt`, `PaulGrahamEssays.json` ({"text": ...}) or a folder of .txt files.

    Raises:
        DataError: if the data folder has none of them or if they are empty.
    """
    if source.folder is None:
        where = "no folder is given"
    else:
        found = [path for name in ESSAYS if (path := source.folder / name).exists()]
        if found:
            return _essays(found[0])
        where = f"{source.folder} has none of them"
    raise DataError(
        "the haystack consists of essays, which kvjax does not include: expected a data folder (--data) with one of "
        f"{', '.join(ESSAYS[:2])} and {ESSAYS[2]}/*.txt; {where}"
    )


@cache
def _essays(path: Path) -> str:
    if path.is_dir():
        text = "".join(read_text(one) for one in sorted(path.glob("*.txt")))
    elif path.suffix == ".json":
        text = Record.of(path.name, parse(path.name, read(path))).text("text")
    else:
        text = read_text(path)
    if not text.strip():
        raise DataError(f"{path} is empty: expected a text")
    return text


def sentences(text: str) -> list[str]:
    """The sentences of a text, which end at `.`, `!` or `?`. This simple rule needs no downloaded model."""
    return SENTENCE_END.split(text.strip())


@cache
def words(kind: str) -> tuple[str, ...]:
    """wonderwords' list of "noun", "adjective" or "verb". Raises ImportError if wonderwords is not installed."""
    try:
        folder = files("wonderwords.assets")
    except ModuleNotFoundError:
        raise ImportError(f"the words of RULER come from wonderwords: expected {installs('eval')}") from None
    lines = (folder / f"{kind}list.txt").read_text("utf-8").splitlines()
    return tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))

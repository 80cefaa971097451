"""What needles lie in: Paul Graham's essays, from the user's own files, and the word lists of wonderwords.

The essays may not be passed on, so they do not come with kvjax.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from .files import Record, parse, read, read_text
from .task import DataError, Source

ESSAYS = ("essays.txt", "PaulGrahamEssays.json", "PaulGrahamEssays")
SENTENCE_END = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["')])\s+""")


def essays(source: Source) -> str:
    """The text of the essays: `essays.txt`, `PaulGrahamEssays.json` ({"text": ...}) or a folder of .txt files.

    Raises DataError if the data folder has none of them, or an empty one.
    """
    if source.folder is None:
        where = "no folder was given"
    else:
        found = [path for name in ESSAYS if (path := Path(source.folder) / name).exists()]
        if found:
            return _essays(found[0])
        where = f"{source.folder} has none"
    raise DataError(
        "the haystack is made of essays, which do not come with kvjax: the data folder (--data) needs one of "
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
        raise DataError(f"{path} has no text")
    return text


def sentences(text: str) -> list[str]:
    """Sentences by their full stops; a simple rule, so that nothing has to be downloaded."""
    return SENTENCE_END.split(text.strip())


@cache
def words(kind: str) -> tuple[str, ...]:
    """wonderwords' list of "noun", "adjective" or "verb"; raises ImportError, saying what to install."""
    try:
        folder = files("wonderwords.assets")
    except ModuleNotFoundError:
        raise ImportError('the words of RULER come from wonderwords; pip install "kvjax[eval]" brings it') from None
    lines = (folder / f"{kind}list.txt").read_text("utf-8").splitlines()
    return tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))

"""Parts of docstrings as Markdown."""

from __future__ import annotations

import inspect
import re
from itertools import chain
from typing import Any

from griffe import Docstring, DocstringSection, parse_google


def text(documented: Any) -> str:
    """Returns what a docstring says outside of its sections."""
    return "\n\n".join(section.value for section in _sections(documented) if section.kind.value == "text")


def arguments(documented: Any) -> dict[str, str]:
    """Returns what docstrings say of each argument of a function, or each attribute of a class and its bases."""
    owners = reversed(documented.__mro__) if inspect.isclass(documented) else [documented]
    sections = chain.from_iterable(_sections(owner) for owner in owners if owner.__doc__)
    listed = (section.value for section in sections if section.kind.value in ("parameters", "attributes"))
    return {each.name: each.description for each in chain.from_iterable(listed)}


def raises(documented: Any) -> str:
    """The errors of a function."""
    listed = (section.value for section in _sections(documented) if section.kind.value == "raises")
    return "; ".join(f"`{each.annotation}` {each.description}" for each in chain.from_iterable(listed))


def first_sentence(text: str) -> str:
    """Up to the full stop of the first sentence, or the colon before an equation, in one line."""
    line = " ".join(text.partition("\n\n")[0].split())
    found = re.match(r"(.+?)(?:\.(?= [A-Z(])|\.$|:(?= score))", line)
    return f"{found[1] if found else line}."


def linked(text: str) -> str:
    """The text with links from numbers of arXiv and from addresses."""
    text = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return re.sub(r"(?<!\]\()https?://(?:www\.)?([\w.-]+)[^\s,;)]*(?<!\.)", r"[\1](\g<0>)", text)


def _sections(documented: Any) -> list[DocstringSection]:
    return parse_google(Docstring(inspect.getdoc(documented) or ""), warnings=False)

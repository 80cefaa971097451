"""Tells how to install what an extra needs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires


def installs(extra: str) -> str:
    """The command that installs the packages of an extra, for messages: it names them, wherever kvjax came from."""
    try:
        stated = [text.partition(";") for text in requires("kvjax") or ()]
    except PackageNotFoundError:  # a checkout that is not installed
        stated = []
    quotes = str.maketrans("'", '"')
    packages = [name.strip() for name, _, marker in stated if f'extra == "{extra}"' in marker.translate(quotes)]
    named = " ".join(f'"{package}"' for package in packages)
    return f"pip install {named} (the extra {extra})" if named else f'pip install ".[{extra}]" in a checkout of kvjax'

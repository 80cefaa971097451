"""Alternative texts of the pictures of notebooks, which nbconvert's template leaves out."""

from __future__ import annotations

import json
import logging
from html import escape
from pathlib import Path

MISSING = 'alt="No description has been provided for this image"'

logging.getLogger("traitlets").setLevel(logging.ERROR)  # its warning is about what `described` mends


def described(html: str, notebook: Path) -> str:
    """Returns the page of a notebook with the texts that the metadata of its outputs has, in order."""
    for cell in json.loads(notebook.read_text())["cells"]:
        for output in cell.get("outputs", []):
            if text := output.get("metadata", {}).get("image/png", {}).get("alt"):
                html = html.replace(MISSING, f'alt="{escape(text)}"', 1)
    return html

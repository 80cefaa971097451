"""The first page of the site, which is the README of the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/kvjax/kvjax/blob/main/"


def page() -> str:
    """Returns the README with links as a page of docs/ has them; files outside of it are in the repository."""
    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    return re.sub(r"\]\(([A-Z]\w+\.\w+)\)", rf"]({REPOSITORY}\1)", text)

"""The first page of the site, which is the README of the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def page(repository: str) -> str:
    """Returns the README with links as a page of docs/ has them; others are at the repository's address."""
    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    return re.sub(r"\]\(([A-Z]\w+\.\w+)\)", rf"]({repository}/blob/main/\1)", text)

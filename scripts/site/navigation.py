"""The navigation of the site, in which a folder stands for its pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def expanded(nav: list[Any], pages: list[str]) -> list[Any]:
    """A navigation in which `FOLDER/` has become the pages of that folder that the rest does not name.

    The folder's index comes first, then its other pages by name.
    """
    left = sorted(set(pages) - set(_named(nav)), key=lambda page: (not page.endswith("index.md"), page))

    def items(nav: Any) -> Iterator[Any]:
        for item in nav if isinstance(nav, list) else [nav]:
            if isinstance(item, dict):
                yield {title: below if _is_page(below) else list(items(below)) for title, below in item.items()}
            elif item.endswith("/"):
                yield from (page for page in left if page.startswith(item))
            else:
                yield item

    return list(items(nav))


def _is_page(item: Any) -> bool:
    return isinstance(item, str) and not item.endswith("/")


def _named(nav: Any) -> Iterator[str]:
    """All paths of a navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(item)

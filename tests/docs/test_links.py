"""Links of Markdown files and notebooks, as a viewer of the repository follows them: to files and to headings."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"^ *```.*?^ *```|^(?: {4}|\t).*?$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    """The Markdown files and notebooks that are tracked, or would be."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.ipynb"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in names if (ROOT / name).exists()]


def text_of(page: Path) -> str:
    """The Markdown of a page."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs.yml make them."""
    text = re.sub(r"^ *```.*?^ *```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    slug, found = slugify(case="lower"), set()
    for heading in re.findall(r"^#+ +(.+?)(?: +#+)?$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        name, count = slug(plain, "-"), 0
        while (each := f"{name}-{count}" if count else name) in found:
            count += 1
        found.add(each)
    return found


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for link in LINK.findall(CODE.sub("", text_of(page))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix in (".md", ".ipynb") and anchor not in anchors(target)):
            found.append(link)
    return found


def test_links_lead_somewhere() -> None:
    assert len(pages()) > 30
    assert {str(page.relative_to(ROOT)): links for page in pages() if (links := broken(page))} == {}


@pytest.mark.parametrize(
    ("link", "leads_nowhere"),
    [
        ("[a](b.md)", False),
        ("[a](b.md#two-words-and-more)", False),
        ("[a](b.md#two-words-and-more-1)", False),
        ("[a](b.md#code)", True),
        ("[a](c.md)", True),
        ("`[a](c.md)`", False),
        ("[a](https://example.com/c.md)", False),
        ("[a](#here)", False),
        ("[a](#there)", True),
    ],
)
def test_broken_links_are_found(tmp_path: Path, link: str, leads_nowhere: bool) -> None:
    (tmp_path / "b.md").write_text("# Two `words`, and more\n\n```\n# code\n```\n\n## Two words and more\n")
    page = tmp_path / "a.md"
    page.write_text(f"# Here\n\n{link}\n")
    assert bool(broken(page)) == leads_nowhere

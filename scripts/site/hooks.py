"""The functions that mkdocs calls while it builds the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.site import api, home, methods, pictures
from scripts.site.navigation import expanded


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are generated, and completes the navigation."""
    pages = {
        "index.md": home.page(config.repo_url or ""),
        **methods.pages(),
        "api/method_parts.md": api.parts_of_methods(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    config.nav = expanded(config.nav or [], [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts the tables of all presets on the page of methods, and all names of modules on pages of the API."""
    if page.file.src_uri == "methods/index.md":
        return methods.index(markdown)
    if page.file.src_uri.endswith(".ipynb"):  # mkdocs-jupyter ends with a list of styles, which would be shown as code
        return re.sub(r"^ *<style>\s*\['pre.*?</style>", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return api.directives(markdown) if page.file.src_uri.startswith("api/") else markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Takes out what a browser would load from other hosts: MathJax, and images such as the badges of notebooks."""
    output = re.sub(r"<script data-mkdocs-jupyter-mathjax=.*?</script>", "", output, flags=re.DOTALL)
    return re.sub(r'<img\b[^>]*\bsrc="https?:[^>]*>', _alternative, output)


def _alternative(image: re.Match[str]) -> str:
    found = re.search(r'\balt="([^"]*)"', image[0])
    return found[1] if found else ""


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Describes the pictures of notebooks."""
    source = Path(page.file.abs_src_path or "")
    return pictures.described(html, source) if source.suffix == ".ipynb" else html

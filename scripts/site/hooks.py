"""The functions that mkdocs calls while it builds the site."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from scripts.site import api, home, methods
from scripts.site.navigation import expanded


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are generated, and completes the navigation."""
    pages = {"index.md": home.page(), **methods.pages(), "api/method_parts.md": api.parts_of_methods()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    config.nav = expanded(config.nav or [], [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts the tables of all presets on the page of methods, and all names of modules on pages of the API."""
    if page.file.src_uri == "methods/index.md":
        return methods.index(markdown)
    return api.directives(markdown) if page.file.src_uri.startswith("api/") else markdown

"""What mkdocs calls while it builds the site."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files

from scripts.site.navigation import expanded


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Completes the navigation."""
    config.nav = expanded(config.nav or [], [file.src_uri for file in files.documentation_pages()])
    return files

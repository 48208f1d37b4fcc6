"""MkDocs hooks: pages that are written from the code when the site is built, so they cannot go stale."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from paceline.cli import app


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference of all commands and their options."""
    text = app.generate_docs(output_format="markdown")
    files.append(File.generated(config, "reference/cli.md", content=text))
    return files

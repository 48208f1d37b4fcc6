"""MkDocs hooks: pages that are written from the code when the site is built, so they cannot go stale."""

from __future__ import annotations

import dataclasses
import re
import typing
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from paceline.cli import app
from paceline.config import RunConfig, flag
from paceline.training.plan import CHANGEABLE


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the references of commands and options."""
    text = app.generate_docs(output_format="markdown")
    # The site's own table of contents stands beside the page.
    text = re.sub(r"## Table of Contents\n.*?(?=\*\*Commands\*\*)", "", text, flags=re.DOTALL)
    files.append(File.generated(config, "reference/cli.md", content=text))
    files.append(File.generated(config, "reference/options.md", content=_options()))
    return files


def _options() -> str:
    """All fields of ``RunConfig`` as a page, a table for each group."""
    groups: dict[str, list[str]] = {}
    hints = typing.get_type_hints(RunConfig)
    for field in dataclasses.fields(RunConfig):
        default = " ".join(field.default) if isinstance(field.default, tuple) else field.default
        shown = "" if default is None or default is False or default == "" else f"`{default}`"
        choices = ", ".join(f"`{choice}`" for choice in _choices(hints[field.name]))
        help_text = field.metadata["help"] + (f" One of {choices}." if "," in choices else "")
        # What identifies the task is compared by itself.
        fixed = " *Fixed.*" if field.name in {"task", "set"} or field.name not in CHANGEABLE else ""
        row = f"| `{flag(field.name)}` | {shown} | {help_text}{fixed} |\n"
        groups.setdefault(field.metadata["group"], []).append(row)
    head = "| Option | Default | |\n|---|---|---|\n"
    tables = [f"## {group}\n\n{head}{''.join(rows)}" for group, rows in groups.items()]
    return "\n".join([_OPTIONS_INTRODUCTION, *tables])


_OPTIONS_INTRODUCTION = """# Options

`paceline train` takes them as `--some-option`, `fit` as the keyword `some_option`, and a file given with
`--config` as the key `some_option`. Where no default is shown, the task's own counts.

What is *fixed* decides the model's bits: a run that is continued keeps it, and another value is refused.
"""


def _choices(hint: Any) -> list[str]:
    """The words that an option of this type may be."""
    if typing.get_origin(hint) is typing.Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    return [word for part in typing.get_args(hint) for word in _choices(part)]


def on_page_content(html: str, **_: Any) -> str:
    """Take Sphinx's roles out of what comes from docstrings: ``:class:`~a.b.C``` becomes ``C``."""
    return re.sub(r":(?:meth|class|func|mod|attr|data):<code>(?:~[\w.]*\.)?", "<code>", html)

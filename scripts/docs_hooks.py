"""MkDocs hooks: pages that are written from the code."""

from __future__ import annotations

import re
import typing
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from paceline.cli import app
from paceline.cli.options import GROUPS
from paceline.core.config import all_options
from paceline.core.options import flag


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference of commands. That of options is a file, which a test compares (``--update`` writes it)."""
    text = app.generate_docs(output_format="markdown")
    # The site has its own table of contents next to the page.
    text = re.sub(r"## Table of Contents\n.*?(?=\*\*)", "", text, flags=re.DOTALL)
    files.append(File.generated(config, "reference/cli.md", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Keep the names of source files and design decisions, whose links lead somewhere in the repository only."""
    return re.sub(r"\[(`[^`]+`)\]\((?:(?:\.\./)+(?:src|plugins)|decisions)/[^)]*\)", r"\1", markdown)


def options_page() -> str:
    """Return all options of a run as a page, a table for each group."""
    groups: dict[str, list[str]] = {}
    for name, its in all_options().items():
        default = " ".join(its.default) if isinstance(its.default, tuple) else its.default
        shown = "" if default is None or default is False or default == "" else f"`{default}`"
        choices = ", ".join(f"`{choice}`" for choice in _choices(its.type))
        help_text = its.help + (f" One of {choices}." if "," in choices else "")
        # What names the task is compared by itself.
        resume = "fixed" if its.scope == "task" else its.resume
        bits = its.bits.replace("_", " ")
        row = f"| `{flag(name)}` | {shown} | {help_text} | {resume} | {bits} |\n"
        groups.setdefault(its.group, []).append(row)
    head = "| Option | Default | | Resume | Bits |\n|---|---|---|---|---|\n"
    tables = [f"## {group}\n\n{head}{''.join(rows)}" for group, rows in sorted(groups.items(), key=_place)]
    return "\n".join([_OPTIONS_INTRODUCTION, *tables])


def _place(group: tuple[str, list[str]]) -> int:
    """Where a group of options stands in ``paceline train --help-all``."""
    return GROUPS.index(group[0])


_OPTIONS_INTRODUCTION = """# Options

`paceline train` takes them as `--some-option`, `fit` as the keyword `some_option`, and a file given with
`--config` as the key `some_option`. If no default is shown, the task's own applies.

*Resume* gives the value of an option when its run is continued:

| Resume | `paceline resume RUN` | `paceline train --run-dir RUN` |
|---|---|---|
| fixed | the recorded value; another one is rejected | the same |
| adjustable | the recorded value, unless another one is given | the same |
| kept | the recorded value, unless another one is given | the present value |
| fresh | the present value | the same |

*Bits* says whether an option decides the bits of the trained model: *always*; *by strategy*, if only some of
its values or some strategies do; *rounding*, if models are equal within rounding; or *never*.
"""


def _choices(hint: Any) -> list[str]:
    """The words that an option of this type may be."""
    if typing.get_origin(hint) is typing.Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    return [word for part in typing.get_args(hint) for word in _choices(part)]


def on_page_content(html: str, **_: Any) -> str:
    """Take Sphinx's roles out of what comes from docstrings: ``:class:`~a.b.C``` becomes ``C``."""
    return re.sub(r":(?:meth|class|func|mod|attr|data):<code>(?:~[\w.]*\.)?", "<code>", html)

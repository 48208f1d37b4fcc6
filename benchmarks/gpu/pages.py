"""The sections of ``docs/gpu-results.md``, and the summary of them in the README."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Machine, Outcome, as_markdown

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu-results.md"
README = ROOT / "README.md"

_NOTHING = "Nothing has been run on a GPU yet.\n"
_SECTION = re.compile(r"^## (?P<heading>(?P<gpus>\d+) x .*): `(?P<command>.*)`\n\n(?P<summary>.*)\.\n", re.MULTILINE)
_README = re.compile(r"(?<=<!-- gpus -->\n).*?(?=\n<!-- /gpus -->)", re.DOTALL)
_WRAPPED: dict[str, Any] = {"width": 120, "break_long_words": False, "break_on_hyphens": False}
_LINKS = "[GPUs](docs/gpus.md), [results](docs/gpu-results.md)"


def add_section(page: str, command: str, machine: Machine, outcomes: Sequence[Outcome], date: str) -> str:
    """Return the page with this section, in place of an earlier one of the same machine and command."""
    heading = f"## {machine.title}: `{command}`"
    section = f"{heading}\n\n{as_markdown(machine, outcomes, date)}\n"
    introduction, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    kept = [each.rstrip() + "\n" for each in sections if not each.startswith(f"{heading}\n")]
    return "\n".join([introduction.replace(_NOTHING, "").rstrip() + "\n", *kept, section])


def readme_line(page: str) -> str:
    """Return the README's summary: the commands that have been run on each GPU, and the cases that never have."""
    found = list(_SECTION.finditer(page))
    if not found:
        return textwrap.fill(
            "**Nothing has been run on a GPU yet**: neither on one nor on several, with NCCL, on nodes or on MIG. "
            f"`make test-gpu` and `make bench-gpu` are ready for one. {_LINKS}.",
            **_WRAPPED,
        )
    run = "; ".join(f"{each['heading']} (`{each['command']}`, {each['summary']})" for each in found)
    several = any(int(each["gpus"]) > 1 for each in found)
    never = "several nodes, MIG" if several else "several GPUs, several nodes, MIG"
    return textwrap.fill(f"Run on: {run}. Never run on: {never}. {_LINKS}.", **_WRAPPED)


def write(command: str, machine: Machine, outcomes: Sequence[Outcome], date: str) -> None:
    """Write the section, and the README's line.

    Raises:
        ValueError: the GPU was a pretended one.
    """
    if not machine.real:
        raise ValueError(f"{machine.title} is not a GPU: the documents are about real ones.")
    page = add_section(PAGE.read_text(), command, machine, outcomes, date)
    PAGE.write_text(page)
    README.write_text(_README.sub(lambda _: readme_line(page), README.read_text()))

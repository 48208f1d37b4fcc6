"""Files that the pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "CONTRIBUTING.md", ROOT / "SCOPE.md", ROOT / "docs/architecture.md", ROOT / "docs/plugins.md")
FOLDERS = (
    *(ROOT / name for name in ("", "src", "src/paceline", "tests", "docs", "plugins")),
    *ROOT.glob("plugins/*/src/*"),
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_of_a_page_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|toml|txt))`", page.read_text()))
    assert named or page.name in ("SCOPE.md", "plugins.md")
    for name in named:
        start, _, end = name.rpartition("/.../")
        if start:  # such as plugins/ray/.../launcher.py
            assert list((ROOT / start).rglob(end)), name
        else:
            assert any((folder / name).is_file() for folder in FOLDERS), name

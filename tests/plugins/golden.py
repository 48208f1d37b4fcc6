"""A pytest plugin: tests compare whole texts with files; ``--update`` replaces the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a user replace the files; the difference shows in review."""
    parser.addoption("--update", action="store_true", help="replace the golden files of tests")


@pytest.fixture
def golden(pytestconfig: pytest.Config) -> Callable[[Path, str], None]:
    """Require that a text is the content of a file."""

    def compare(path: Path, text: str) -> None:
        if pytestconfig.getoption("--update"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path} differs; --update replaces it"

    return compare

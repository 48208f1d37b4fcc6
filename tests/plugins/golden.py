"""A pytest plugin: texts that tests compare as a whole stand in files, which ``--update`` writes anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let files follow what the code writes now; the difference shows in review."""
    parser.addoption("--update", action="store_true", help="write the golden files of tests anew")


@pytest.fixture
def golden(pytestconfig: pytest.Config) -> Callable[[Path, str], None]:
    """Require that a text is the content of a file."""

    def compare(path: Path, text: str) -> None:
        if pytestconfig.getoption("--update"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path} differs; --update writes it anew"

    return compare

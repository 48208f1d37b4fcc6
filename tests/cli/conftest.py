"""For tests that run the command in their own process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.cli.faulty import TASKS, Paceline, Said

from paceline import cli


@pytest.fixture(scope="module")
def numerics() -> Iterator[None]:
    """Runs in this process set torch's threads and determinism for the whole of it."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])


@pytest.fixture
def paceline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Paceline:
    """Run ``paceline ARGUMENTS`` here, in a directory with ``tasks.py``."""
    (tmp_path / "tasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        code = cli.main()
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        return Said(code, said.out, said.err)

    return run
